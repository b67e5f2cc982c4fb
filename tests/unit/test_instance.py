"""Instance id of a node: one per start, and none while no node runs."""

from pathlib import Path

from tasuki.config.lock import NODE_LOCK, Instance, StateLock, begin_instance, holder, read_instance
from tasuki.wire.flock import is_free


def test_each_start_has_a_name_of_its_own_while_it_holds_the_lock(tmp_path: Path) -> None:
    assert read_instance(tmp_path) == Instance()
    names: list[str] = []
    for _ in range(2):
        with StateLock.take(tmp_path, name=NODE_LOCK):
            begin_instance(tmp_path)
            told = read_instance(tmp_path)
            assert told == read_instance(tmp_path)
            assert not is_free(Path(told.lock_path))
            names.append(told.id)
        assert is_free(Path(told.lock_path))
        assert read_instance(tmp_path) == Instance()  # killed, so its file is left
    assert len(set(names)) == 2
    assert all(names)


def test_a_lock_names_its_newest_holder_whatever_the_length_of_the_pid(tmp_path: Path) -> None:
    with StateLock.take(tmp_path, name=NODE_LOCK) as lock:
        for pid in (4_194_303, 7):
            lock.sign(pid)
            assert holder(tmp_path, name=NODE_LOCK) == pid
