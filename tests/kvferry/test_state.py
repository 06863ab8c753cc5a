import os
from pathlib import Path

import pytest

from kvferry.errors import CommandError, NoCluster
from kvferry.state import ClusterRecord, only_cluster, read_record, write_record

RECORD = ClusterRecord(
    pid=1,
    model="smollm2",
    launcher="ray",
    grpc_address="127.0.0.1:50051",
    http_url="http://127.0.0.1:8000",
    redis_url="redis://:secret@127.0.0.1:6380/0",
    key_prefix="kvferry",
)


def test_the_record_of_a_running_cluster_is_found_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with only_cluster(folder):
        with pytest.raises(NoCluster, match="still starting"):
            read_record(folder)
        write_record(folder, RECORD)
        assert read_record(folder) == RECORD
        assert (folder / "cluster.json").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700


def test_without_a_running_cluster_the_way_to_one_is_shown(tmp_path: Path) -> None:
    with pytest.raises(NoCluster, match="start one with `kvferry up`"):
        read_record(tmp_path / "state")
    with only_cluster(tmp_path):
        write_record(tmp_path, RECORD)
    with pytest.raises(NoCluster, match="no cluster is running"):
        read_record(tmp_path)


def test_the_record_of_a_cluster_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    with only_cluster(tmp_path):
        pass
    write_record(tmp_path, RECORD)  # left behind: nobody holds the lock
    with pytest.raises(NoCluster, match="no cluster is running"):
        read_record(tmp_path)


def test_two_clusters_never_share_a_state_directory(tmp_path: Path) -> None:
    with (
        only_cluster(tmp_path),
        pytest.raises(CommandError, match=r"already running .*--state-dir"),
        only_cluster(tmp_path),
    ):
        pass


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CommandError, match="choose another with --state-dir"),
        only_cluster(tmp_path / "file"),
    ):
        pass
    assert os.path.exists(tmp_path / "file")
