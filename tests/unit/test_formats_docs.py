# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The worked example in docs/formats.md runs and holds."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_example_in_the_documentation():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
