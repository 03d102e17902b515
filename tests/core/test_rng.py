from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from icefrog.rng import Streams, generator, pick

words = st.lists(st.integers(0, 2**40), min_size=1, max_size=4)
weights = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=8)


@given(words=words)
def test_the_stream_is_that_of_default_rng(words):
    assert generator(*words).random(3).tolist() == np.random.default_rng(words).random(3).tolist()


@given(seed=st.integers(0, 2**32 - 1), weights=weights)
def test_a_pick_is_the_choice_of_numpy(seed, weights):
    shares = np.array(weights) / np.sum(weights)
    mine, theirs = generator(seed), generator(seed)
    assert [pick(mine, weights) for _ in range(5)] == [int(theirs.choice(len(weights), p=shares)) for _ in range(5)]


@given(seed=st.integers(0, 2**40), keys=st.lists(st.text(), unique=True, max_size=5), stream=st.integers(0, 2**33))
def test_streams_are_the_generators_of_their_keys(seed, keys, stream):
    streams = Streams(seed, keys, stream)
    assert list(streams) == keys
    for key in keys:
        alone = np.random.default_rng([seed, zlib.crc32(key.encode()), stream])
        assert streams[key].standard_normal(3).tolist() == alone.standard_normal(3).tolist()
