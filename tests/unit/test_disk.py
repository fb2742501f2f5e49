"""Small files written whole, and errors of a failing disk."""

import errno
import os

import pytest

from components.disk import failed_write, remove_tree, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_small_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "before\n")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "after\n")
    assert path.read_text() == "before\n"
    assert names(tmp_path) == ["a.json"]


def test_remove_tree_does_not_mind_absence(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert names(tmp_path) == []


def test_what_a_failing_disk_says_is_found_behind_other_errors():
    assert failed_write(OSError(errno.ENOSPC, "full")) == (errno.ENOSPC, "full")
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert failed_write(Exception(text)) == (errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert failed_write(RuntimeError("shape")) is None
