"""Addresses of queues differ, and a uid says who has its request."""

from __future__ import annotations

import itertools
from pathlib import Path

from minisgl.processes.addresses import DETOKENIZER, Addresses, api_of, tokenizer_of, uids_of_api


def test_every_queue_has_an_address_of_its_own(tmp_path: Path) -> None:
    addresses = Addresses(tmp_path, num_tokenizer=3, num_api=2)
    names = [*addresses.frontends, *addresses.peers, addresses.scheduler, addresses.detokenizer]
    names += [*addresses.tokenizers, addresses.rank(1), addresses.rank(2)]

    assert len(set(names)) == len(names) == 11


def test_a_successor_has_an_address_of_its_own_until_all_start_again(tmp_path: Path) -> None:
    first = Addresses(tmp_path, num_tokenizer=2)
    later = first.in_life("tokenizer-1", 1).in_life(DETOKENIZER, 2)

    assert later.tokenizers[0] == first.tokenizers[0]
    assert later.tokenizers[1] != first.tokenizers[1]
    assert later.detokenizer != first.in_life(DETOKENIZER, 1).detokenizer
    assert [later.life_of(name) for name in later.tokenizer_names] == [0, 1]
    assert (later.scheduler, later.frontends) == (first.scheduler, first.frontends)
    assert later.in_epoch(1) == first.in_epoch(1) != first


def test_a_uid_says_which_api_process_and_which_tokenizer_have_its_request() -> None:
    uids = {api: list(itertools.islice(uids_of_api(api, 3), 6)) for api in range(3)}

    assert sorted(itertools.chain(*uids.values())) == list(range(18))
    for api, its_uids in uids.items():
        assert {api_of(uid, 3) for uid in its_uids} == {api}
        assert [tokenizer_of(uid, 3, 2) for uid in its_uids] == [0, 1] * 3


def test_without_tokenizers_the_detokenizer_takes_their_messages(tmp_path: Path) -> None:
    addresses = Addresses(tmp_path)

    assert addresses.tokenizers == [addresses.detokenizer]
