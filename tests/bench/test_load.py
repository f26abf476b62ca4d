import re
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gimbal_jax.bench.load import LoadConfig, lengths_of, make_calls, one_token_words, poisson_arrivals

IDS = np.arange(100, 1100)
LOAD = LoadConfig(requests=20, input_len=32, output_len=4)


def word_tokenizer(words: int) -> str:
    """Words "aa", "ab", ... with and without a blank before them, numbers, and a special token."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [first + second for first in letters for second in letters][:words]
    tokens = ["?", *names, *(f"Ġ{name}" for name in names), "Ġ12", "Ġa1"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([" end"])
    return str(tokenizer.to_str())


def prompts(load: LoadConfig, kind="offline", number=0) -> list[tuple[int, ...]]:
    return [call.prompt for call in make_calls(load, lengths_of(load), IDS, kind=kind, round_number=number)]


def test_fixed_lengths():
    assert lengths_of(LoadConfig(requests=2)) == [(128, 64), (128, 64)]
    assert lengths_of(LoadConfig(requests=1, input_len=7, output_len=3)) == [(7, 3)]


def test_lengths_of_a_file_are_its_own_unless_means_are_given(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,4\n1,30,4\n2,999,999\n")
    load = LoadConfig(requests=2, trace=str(path))
    assert lengths_of(load) == [(10, 4), (30, 4)]
    assert lengths_of(replace(load, input_len=40)) == [(20, 4), (60, 4)]
    assert lengths_of(replace(load, output_len=2)) == [(10, 2), (30, 2)]
    with pytest.raises(ValueError, match=r"requests must be at most the 3 of .*trace.csv, not 4"):
        lengths_of(replace(load, requests=4))


def test_the_shipped_trace_has_the_means_asked_for_and_mixed_lengths():
    inputs, outputs = np.array(lengths_of(LoadConfig(requests=200, trace="sharegpt-like", input_len=100))).T
    assert (inputs.mean(), outputs.mean()) == (pytest.approx(100, abs=1), pytest.approx(64, abs=1))
    assert inputs.max() > 4 * np.median(inputs) > 4 * inputs.min() > 0


def test_poisson_arrivals_have_exponential_gaps():
    gaps = np.diff(poisson_arrivals(20_000, 4.0, np.random.default_rng(1)), prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03), "the coefficient of variation is 1"
    assert np.mean(gaps > 0.5) == pytest.approx(np.exp(-2), rel=0.05)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_calls_come_at_once_or_at_the_rate():
    lengths = lengths_of(LOAD)
    at_once = make_calls(LOAD, lengths, IDS, kind="offline", round_number=0)
    assert {call.arrival_s for call in at_once} == {0.0}
    assert {(len(call.prompt), call.max_tokens) for call in at_once} == {(32, 4)}
    online = [make_calls(LOAD, lengths, IDS, kind="online", round_number=n, rate=5.0) for n in (0, 1)]
    first, second = ([call.arrival_s for call in calls] for calls in online)
    assert first == sorted(first) and first != second
    assert 1.0 < first[-1] < 16.0, "20 requests, 5 per second"


def test_no_two_prompts_begin_alike_unless_asked():
    rounds = [prompts(LOAD, kind, n) for kind in ("warmup", "offline", "online") for n in (0, 1)]
    everything = [prompt for round in rounds for prompt in round]
    assert len({prompt[:4] for prompt in everything}) == len(everything) == 120
    assert set(sum(everything, ())) <= set(IDS.tolist())
    assert prompts(LOAD) == rounds[2] and prompts(replace(LOAD, seed=1)) != rounds[2]


def test_the_shared_prefix_is_that_share_of_every_prompt_in_every_round():
    load = replace(LOAD, shared_prefix=0.75)
    everything = [*prompts(load, "warmup"), *prompts(load, "offline", 1), *prompts(load, "online", 2)]
    assert len({prompt[:24] for prompt in everything}) == 1
    assert len({prompt[24] for prompt in everything}) > 40, "60 draws of 1,000"
    mixed = make_calls(load, [(10, 1), (32, 1)], IDS, kind="offline", round_number=0)
    assert mixed[0].prompt[:8] == mixed[1].prompt[:8] and mixed[0].prompt[8] != mixed[1].prompt[8]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("requests", 0, "requests must be at least 1, not 0"),
        ("input_len", 0, "input_len must be at least 1, not 0"),
        ("output_len", -1, "output_len must be at least 1, not -1"),
        ("rounds", 0, "rounds must be at least 1, not 0"),
        ("warmup", -1, "warmup must be at least 0, not -1"),
        ("seed", -1, "seed must be at least 0, not -1"),
        ("shared_prefix", 1.0, "shared_prefix must be from 0 to below 1, not 1"),
        ("shared_prefix", -0.1, "shared_prefix must be from 0 to below 1, not -0.1"),
    ],
)
def test_settings_out_of_range_are_named(field, value, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        replace(LOAD, **{field: value})


def test_prompts_of_words_have_the_same_tokens_as_text():
    text = word_tokenizer(150)
    words = one_token_words(text)
    assert len(words) == 150 and all(re.fullmatch(" [a-z]{2}", word) for word in words.values())
    ids = np.random.default_rng(0).choice(list(words), 500).tolist()
    assert tokenizers.Tokenizer.from_str(text).encode("".join(words[id] for id in ids)).ids == ids


def test_a_tokenizer_with_few_words_is_refused():
    with pytest.raises(ValueError, match="only 99 words are one token each"):
        one_token_words(word_tokenizer(99))
