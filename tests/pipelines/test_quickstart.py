"""What the quickstart refuses before it writes anything."""

from __future__ import annotations

import pytest

from pipelines.quickstart import QuickstartConfig, main
from rl_dialog.errors import UserError


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"dialogs": 0}, {"episodes": 0}, {"max_steps": -1}], ids=str)
def test_numbers_out_of_range_are_told(tmp_path, wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(UserError, match=f"expected --{name} of at least {value + 1}, got {value}"):
        main(QuickstartConfig(output_dir=str(tmp_path / "out"), quiet=True, **wrong))
    assert not (tmp_path / "out").exists()
