"""What the scripts of hostile load send and conclude, without a server."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stress.checked_streams import Sample, Seen
from benchmarks.stress.fuzz_requests import (
    BAD_PARAMS,
    METHODS,
    UNSUPPORTED,
    WRONG_ELSEWHERE,
    generate_request,
    message_of,
)
from benchmarks.stress.soak import Soak, quarters, rss_slope
from gimbal_jax.exceptions import InvalidField, Unsupported
from gimbal_jax.serving.rpc.parsing import Limits, parse_generate
from tests.serving.fake_server import CONFIG, MODEL, write_model_folder


@pytest.fixture(scope="module")
def limits(tmp_path_factory):
    from gimbal_jax.serving.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))
    return Limits(MODEL, CONFIG, tokenizer, None, lambda: 1)


def test_the_request_that_gets_one_wrong_field_is_good(limits):
    assert parse_generate(generate_request(), limits).sampling.max_tokens == 3


# What is wrong with constraints is found by the library, of which tests/serving/text/test_grammar.py tells.
@pytest.mark.parametrize("name", [name for name in BAD_PARAMS if name not in ("json_schema", "regex")])
@given(data=st.data())
def test_each_wrong_value_is_refused_by_its_name(limits, name, data):
    with pytest.raises(InvalidField, match=name):
        parse_generate(generate_request(**{name: data.draw(BAD_PARAMS[name])}), limits)


@pytest.mark.parametrize("request_", WRONG_ELSEWHERE, ids=str)
def test_wrong_requests_are_refused(limits, request_):
    with pytest.raises(InvalidField):
        parse_generate(request_, limits)


@pytest.mark.parametrize("request_", UNSUPPORTED, ids=str)
def test_what_we_do_not_do_is_said(limits, request_):
    with pytest.raises(Unsupported):
        parse_generate(request_, limits)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
@given(data=st.data())
def test_any_message_can_be_sent(method, data):
    assert isinstance(data.draw(message_of(method.input_type)).SerializeToString(), bytes)


def sample(time_s, rss_mib):
    return Sample(time_s, rss_mib, 0, 0, 0, 0, 0)


def test_the_slope_of_memory_leaves_out_the_beginning():
    filling = [sample(t, 100 + 10 * t) for t in range(0, 250, 5)]
    steady = [sample(t, 2600 + 36 * (t - 250) / 3600) for t in range(250, 1001, 5)]
    assert rss_slope(filling + steady) == pytest.approx(36)
    assert np.isnan(rss_slope(steady[:2]))


def test_quarters_are_of_whole_streams_alone():
    seen = [
        Seen(t, fate, "OK", tokens=11, ttft_s=0.1 * (1 + t // 25), e2e_s=0.1 * (1 + t // 25) + 1.0, wrong="", gap=None)
        for t in range(100)
        for fate in ("whole", "late")
    ]
    rows = quarters(Soak(seen), 100)
    assert [row[0] for row in rows] == [25] * 4
    assert [row[1] for row in rows] == pytest.approx([100, 200, 300, 400])
    assert [row[3] for row in rows] == pytest.approx([100] * 4)
