"""Models on drives of Windows and of the network are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.processes.slow_file_systems import slow_file_system

SHARED = "a drive of Windows under WSL, or a folder that a virtual machine shares"
MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:31 / /mnt/c rw,noatime - 9p C:\134 rw,aname=drvfs;path=C:\;uid=1000
31 30 0:32 / /mnt/c/linux rw - ext4 /dev/sdb rw
32 22 0:33 / /srv/my\040models rw shared:5 master:2 - nfs4 server:/models rw
33 22 0:34 / /twice rw - nfs server:/a rw
34 33 0:35 / /twice rw - tmpfs tmpfs rw
35 22 0:36 / /mnt/virtio rw,relatime - virtiofs models rw
36 22 0:37 / /media/sf_models rw - vboxsf models rw
37 22 0:38 / /mnt/hgfs rw - fuse.vmhgfs-fuse vmhgfs-fuse rw
38 22 0:39 / /mnt/s3 rw - fuse.s3fs s3fs rw
39 22 0:40 / /mnt/gcs rw - fuse.gcsfuse models rw
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/home/me/model.gguf", None),
        (
            "/mnt/c/Users/me/model.gguf",
            f"{SHARED} (9p)",
        ),
        ("/mnt/virtio/model.gguf", f"{SHARED} (virtiofs)"),
        ("/media/sf_models/model.gguf", f"{SHARED} (vboxsf)"),
        ("/mnt/hgfs/model.gguf", f"{SHARED} (fuse.vmhgfs-fuse)"),
        ("/mnt/s3/model.gguf", "a bucket of an object store (fuse.s3fs)"),
        ("/mnt/gcs/model.gguf", "a bucket of an object store (fuse.gcsfuse)"),
        ("/mnt/cdrom/model.gguf", None),
        ("/mnt/c/linux/model.gguf", None),
        ("/srv/my models/model.gguf", "a network drive (nfs4)"),
        ("/srv/my models", "a network drive (nfs4)"),
        ("/twice/model.gguf", None),
    ],
)
def test_what_a_path_is_on(path: str, told: str | None, root: Path) -> None:
    assert slow_file_system(Path(path), root) == told


def test_a_link_is_where_it_leads(root: Path) -> None:
    link = root / "model.gguf"
    link.symlink_to("/mnt/c/model.gguf")
    assert slow_file_system(link, root) is not None


def test_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert slow_file_system(Path("/model.gguf"), tmp_path) is None
