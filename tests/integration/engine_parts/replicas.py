"""Distribution of requests over the engine's replicas."""

from hypothesis import given
from hypothesis import strategies as st

from tasuki.rollout.sessions import shares

NUM_RUNNING = st.lists(st.integers(0, 500), min_size=1, max_size=8)


def test_requests_are_cut_into_runs_of_neighbours() -> None:
    assert shares([0, 0], 8) == [range(4), range(4, 8)]
    assert shares([0, 0, 0], 4) == [range(2), range(2, 3), range(3, 4)]
    assert shares([3], 5) == [range(5)]


def test_a_busier_replica_gets_fewer_requests() -> None:
    assert shares([6, 0, 2], 4) == [range(0), range(3), range(3, 4)]
    assert shares([100, 0], 1) == [range(0), range(1)]
    assert shares([1, 1], 0) == [range(0), range(0)]


@given(num_running=NUM_RUNNING, num_requests=st.integers(0, 2000))
def test_every_request_goes_to_one_replica_and_loads_stay_even(num_running: list[int], num_requests: int) -> None:
    given_out = shares(num_running, num_requests)
    assert [index for share in given_out for index in share] == list(range(num_requests))
    after = [running + len(share) for running, share in zip(num_running, given_out, strict=True)]
    lowest = min(after)
    assert all(total <= lowest + 1 for total, share in zip(after, given_out, strict=True) if share)
