// SPDX-License-Identifier: Apache-2.0
// ds_fp4 Team
//
// The Python module over kernels.cu. No torch header: pointers come as integers inside the packed parameters, which
// keeps the build short and the module independent of torch's ABI.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"

#define DS_FP4_STRING_(x) #x
#define DS_FP4_STRING(x) DS_FP4_STRING_(x)

namespace py = pybind11;

namespace {

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const ds_fp4::KernelEntry& kernel : ds_fp4::kernel_table()) {
        names.emplace_back(kernel.name);
    }
    return names;
}

void load_all() {
    for (const ds_fp4::KernelEntry& kernel : ds_fp4::kernel_table()) {
        const std::string error = ds_fp4::load_kernel(kernel);
        if (!error.empty()) {
            throw std::runtime_error("CUDA kernel " + std::string(kernel.name) + " could not be loaded: " + error +
                                     " (this module has code for " DS_FP4_STRING(DS_FP4_ARCHITECTURES)
                                     "; if it lacks this GPU, install ds_fp4 again with TORCH_CUDA_ARCH_LIST naming "
                                     "it, or without DS_BUILD_FP4)");
        }
    }
}

void launch(size_t kernel, unsigned grid, unsigned threads, const py::bytes& params, std::uintptr_t stream) {
    const ds_fp4::KernelEntry& entry = ds_fp4::kernel_table().at(kernel);
    const std::string_view bytes = params;
    if (bytes.size() != entry.params_bytes) {
        throw std::invalid_argument(std::string(entry.name) + " takes " + std::to_string(entry.params_bytes) +
                                    " bytes of parameters, got " + std::to_string(bytes.size()));
    }
    const std::string error =
        ds_fp4::launch_kernel(entry, grid, threads, bytes.data(), reinterpret_cast<void*>(stream));
    if (!error.empty()) {
        throw std::runtime_error("CUDA kernel " + std::string(entry.name) + " could not be launched: " + error);
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "CUDA kernels of ds_fp4; use ds_fp4.ops";
    m.attr("sources_hash") = DS_FP4_STRING(DS_FP4_SOURCES_HASH);
    m.attr("cuda_version") = DS_FP4_STRING(DS_FP4_CUDA_VERSION);
    m.attr("architectures") = DS_FP4_STRING(DS_FP4_ARCHITECTURES);
    m.def("kernel_names", &kernel_names, "Names of the kernels, in the order of their numbers.");
    m.def("load_all", &load_all,
          "Load every kernel on the current device; raises RuntimeError if one has no code for it.");
    m.def("launch", &launch, py::arg("kernel"), py::arg("grid"), py::arg("threads"), py::arg("params"),
          py::arg("stream"),
          "Launch a kernel by its number; raises RuntimeError with the kernel's name if CUDA refuses.");
}
