# SPDX-License-Identifier: Apache-2.0
"""Layers put into a tree in memory give what tar makes of them in a root of its own.

GNU tar is started after chroot(2) into a fresh directory, by its own loader from copies that lie there under a name
which no generated member has.  So '/' and '..' in symbolic links mean to it what they mean to a sandbox.
"""

import io
import os
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dsecd.core.images.objects import ObjectWriter, make_fan_out
from dsecd.core.images.reader import ForwardReader
from dsecd.core.images.tarstream import TarImport
from dsecd.core.images.tree import Kind, Limits, Node, Tree
from tests.support.images import tar_bytes

_TOOLS = ".tools"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tar, its loader and its libraries in one directory."""
    place = tmp_path_factory.mktemp("tools")
    program = shutil.which("tar")
    assert program is not None
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in (program, *re.findall(r"(/\S+) \(0x", said)):
        shutil.copy(path, place)
    return place


def untar(root: Path, archive: bytes) -> bool:
    """Whether tar, with `root` as its '/', takes the whole archive."""
    loader = next((root / _TOOLS).glob("ld-*")).name
    done = subprocess.run(
        [f"/{_TOOLS}/{loader}", "--library-path", f"/{_TOOLS}", f"/{_TOOLS}/tar", "--extract", "--file=-",
         "--absolute-names", "--no-same-owner", "--directory=/"],
        input=archive, capture_output=True, check=False, preexec_fn=lambda: os.chroot(root), cwd="/",
    )  # fmt: skip
    return done.returncode == 0


def of_directory(root: Path) -> dict[str, object]:
    """Every path with what it is, read from the kernel; hard links of a file have the same first name."""
    found: dict[str, object] = {}
    first: dict[int, str] = {}
    for place, directories, files in os.walk(root):
        directories.sort()
        for name in sorted([*directories, *files]):
            path = Path(place) / name
            shown, info = str(path.relative_to(root)), path.lstat()
            if stat.S_ISLNK(info.st_mode):
                found[shown] = ("link", os.readlink(path))
            elif stat.S_ISDIR(info.st_mode):
                found[shown] = "directory"
            else:
                found[shown] = ("file", path.read_bytes())
            if not stat.S_ISDIR(info.st_mode):
                found[shown] = (found[shown], info.st_nlink > 1 and first.setdefault(info.st_ino, ""), info.st_nlink)
    return found


def of_tree(tree: Tree, place: Path) -> dict[str, object]:
    """The same of a tree in memory."""
    names: dict[int, int] = {}
    for _, node in tree.walk():
        names[id(node)] = names.get(id(node), 0) + 1
    found: dict[str, object] = {}
    for path, node in tree.walk():
        count = names[id(node)]
        shown = path.decode()
        if node.kind is Kind.DIR:
            found[shown] = "directory"
        elif node.kind is Kind.SYMLINK:
            found[shown] = (("link", node.target.decode()), count > 1 and "", count)
        else:
            found[shown] = (("file", _content(node, place)), count > 1 and "", count)
    return found


def _content(node: Node, place: Path) -> bytes:
    return b"" if node.digest is None else (place / "staging" / node.digest.hex()).read_bytes()


plain = st.sampled_from(["a", "b", "c"])
any_name = st.sampled_from(["a", "b", "l", "m"])
# Links have names of their own, and lie below none: a member never replaces a link on its own way, at which tar would
# begin anew with the way gone.
paths = st.tuples(st.lists(any_name, max_size=3), plain).map(lambda pair: "/".join([*pair[0], pair[1]]))
links = st.tuples(st.lists(plain, max_size=2), st.sampled_from(["l", "m"])).map(
    lambda pair: "/".join([*pair[0], pair[1]])
)
steps = st.sampled_from(["a", "b", "c", "l", "m", "..", "."])
targets = st.tuples(st.sampled_from(["", "/", "./"]), st.lists(steps, min_size=1, max_size=4)).map(
    lambda pair: pair[0] + "/".join(pair[1])
)
entries = st.one_of(
    st.tuples(st.just("file"), paths, st.text("xy", max_size=2)),
    st.tuples(st.just("directory"), paths, st.just("")),
    st.tuples(st.just("link"), links, targets),
    # To itself, tar would allow it even for a directory.
    st.tuples(st.just("hard"), paths, st.one_of(paths, links)).filter(lambda entry: entry[1] != entry[2]),
)
archives = st.lists(entries, min_size=1, max_size=6)
_TYPES = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}


def member(kind: str, name: str, more: str) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.type, info.mode = _TYPES[kind], 0o755
    if kind == "file":
        info.size = len(more)
        return info, more.encode()
    info.linkname = more
    return info, None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("roots")
    yield directory
    shutil.rmtree(directory)


#: The same examples in each run, as those of the unit tests; ``DSEC_TEST_LONG=1`` makes others each time.
_SAME = not os.environ.get("DSEC_TEST_LONG")


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=_SAME)
@given(layers=st.lists(archives, min_size=1, max_size=3))
def test_a_tree_of_layers_is_what_tar_makes_of_them_in_a_root_of_its_own(
    layers: list[list[tuple[str, str, str]]], tools: Path, place: Path
) -> None:
    root, store = place / "root", place / "store"
    for directory in (root, store):
        shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(tools, root / _TOOLS, copy_function=os.link)
    make_fan_out(store / "objects")
    (store / "staging").mkdir()
    tree = Tree(Limits())
    with ObjectWriter(store / "objects", store / "staging") as writer:
        for layer in layers:
            archive = tar_bytes([member(*entry) for entry in layer])
            # What tar fails at (a file in the place of a directory with children), we may take as layers mean it.
            assume(untar(root, archive))
            reader = ForwardReader(io.BytesIO(archive).read, "test")
            TarImport(tree, writer, layered=False, tick=lambda: None).run(reader)
            tree.start_layer()
        writer.finish()
    shutil.rmtree(root / _TOOLS)
    assert of_tree(tree, store) == of_directory(root)
