from __future__ import annotations

import pytest

from manyhands.runtime.finishing import finishing, finishing_for_s


def test_it_is_known_for_how_long_something_wants_to_finish() -> None:
    assert finishing_for_s() == 0.0
    with finishing(50.0):
        assert 40 < finishing_for_s() <= 50
        with pytest.raises(OSError, match="disk"), finishing(500.0):  # noqa: PT012
            assert finishing_for_s() > 400
            raise OSError("the disk is full")
        assert finishing_for_s() <= 50
    assert finishing_for_s() == 0.0
    with finishing(-1.0):
        assert finishing_for_s() < 0 or finishing_for_s() == 0.0, "it has had its time"
