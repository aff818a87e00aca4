import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.base.run_id import MAX_LENGTH, checked_run_id


@pytest.mark.parametrize("run_id", ["a", "my-albert", "ALBERT_2", "албанский", "x" * MAX_LENGTH, "a:b", "🐙"])
def test_valid_run_ids_are_accepted(run_id: str) -> None:
    assert checked_run_id(run_id) == run_id


@pytest.mark.parametrize(
    ("run_id", "said"),
    [
        ("", "run_id is empty"),
        ("x" * (MAX_LENGTH + 1), "has 65 characters; at most 64"),
        ("my.albert", "'my.albert' has a '.'"),
        ("my/albert", "a '/'"),
        ("my albert", "a space"),
        ("my\nalbert", r"'my\nalbert'"),
        ("my\x00albert", r"'my\x00albert'"),
        ("my\u200balbert", "unprintable"),
    ],
)
def test_invalid_run_ids_are_refused_with_the_rule_and_an_example(run_id: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_run_id(run_id)
    assert said in str(caught.value)
    assert str(caught.value).endswith("for example: my-albert")
    assert len(str(caught.value)) < 160


@given(st.text(max_size=80))
def test_accepted_run_ids_fit_in_a_dht_key_and_on_one_line(run_id: str) -> None:
    try:
        checked_run_id(run_id)
    except ConfigError:
        return
    assert 1 <= len(run_id) <= MAX_LENGTH
    assert run_id.split() == [run_id]
    assert not set("./") & set(run_id)
