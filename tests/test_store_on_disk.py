"""The store of compiled kernels: what is found, what is made, and what no fault of a disk or a process may cause."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epifuse.base import stock, store
from epifuse.base.config import Config, from_environment, to_environment
from epifuse.base.errors import ArgumentError
from tests.store_faults import DAMAGES, content, damage, maker

PROGRAM = Path(__file__).with_name("store_faults.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and nothing told yet."""
    return use(monkeypatch, cache_dir=tmp_path / "cache")


def use(monkeypatch: pytest.MonkeyPatch, **options: object) -> Path:
    monkeypatch.setattr(store, "CONFIG", Config(**options))
    monkeypatch.setattr(store, "_warned", {})
    monkeypatch.setattr(store, "_private", None)
    return store.CONFIG.cache_dir


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One line for each file made."""
    path = tmp_path / "made"
    path.touch()
    return path


def fetch(name: str, log: Path) -> Path:
    path = store.fetch(store.key_of(name), ".so", maker(name, log))
    assert path.read_bytes() == content(name)
    return path


def find(name: str) -> Path | None:
    return store.find(store.key_of(name), ".so")


def run(case: str, *words: str, **environment: object) -> str:
    """A case of tests/store_faults.py; a test of its own process, because it forks, kills or gives up rights."""
    done = subprocess.run(
        [sys.executable, PROGRAM, case, *words],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- keys and files --------------------------------------------------------------------------------------------------


def test_a_file_is_made_once_and_then_found(folder: Path, log: Path) -> None:
    assert find("x") is None
    path = fetch("x", log)
    assert find("x") == fetch("x", log) == path
    assert folder in path.parents
    assert log.read_text().split() == ["x"]
    assert store.find(store.key_of("x"), ".o") is None
    assert find("y") is None


def test_a_key_holds_each_part_and_where_it_ends() -> None:
    keys = [store.key_of(*parts) for parts in ([], [""], ["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c"])]
    assert len(set(keys)) == len(keys) - 1
    assert keys[-1] == keys[2]


@pytest.mark.parametrize("change", ["a comment", "another name", "a file more"])
def test_another_version_has_other_keys(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "epifuse"
    shutil.copytree(Path(store.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "__file__", str(copy / "base" / "store.py"))
    assert store._own_source.__wrapped__() == store._own_source(), "the same source in another folder is the same"
    deep = copy / "providers" / "cpu" / "emit_cpp.py"
    match change:
        case "a comment":
            deep.write_text(deep.read_text() + "# \n")
        case "another name":
            deep.rename(deep.with_name("emit.py"))
        case _:
            (copy / "ir" / "new.py").touch()
    assert store._own_source.__wrapped__() != store._own_source()


def test_what_make_raises_is_passed_on_and_nothing_is_stored(folder: Path, log: Path) -> None:
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        store.fetch(store.key_of("x"), ".so", make)
    assert find("x") is None
    fetch("x", log)


def test_without_compiling_a_stored_file_is_found(folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("x", log)
    use(monkeypatch, cache_dir=folder, no_compile=True)
    fetch("x", log)
    with pytest.raises(NotImplementedError, match="cpu_native is not compiled"):
        store.fetch(store.key_of("y"), ".so", maker("y", log), "cpu_native")
    assert log.read_text().split() == ["x"]


def test_folders_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = from_environment({"EPIFUSE_CACHE_DIR": "kernels", "EPIFUSE_CACHE_READONLY": ""})
    assert (read.cache_dir, read.cache_readonly) == (tmp_path / "kernels", None)


@pytest.mark.parametrize(
    ("variable", "value", "want"),
    [("EPIFUSE_NO_COMPILE", "yes", "0 or 1"), ("EPIFUSE_PANEL_BYTES", "abc", "a whole number")],
)
def test_a_variable_that_cannot_be_read_is_an_error_of_ours(variable: str, value: str, want: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{variable} must be {want}, got '{value}'$"):
        from_environment({variable: value})


@pytest.mark.parametrize("options", [{}, {"cache_dir": Path("/kernels"), "cache_bytes": 0, "no_compile": True}])
def test_what_a_worker_is_told_is_what_its_parent_read(options: dict[str, Any]) -> None:
    assert from_environment(to_environment(Config(**options))) == Config(**options)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_removed_and_made_again(how: str, folder: Path, log: Path) -> None:
    path = fetch("x", log)
    damage(path, how)
    assert find("x") is None
    assert not path.exists()
    fetch("x", log)
    damage(path, how)
    fetch("x", log)
    assert len(log.read_text().split()) == 3


def test_a_damaged_name_is_not_found(folder: Path, log: Path) -> None:
    path = fetch("x", log)
    first = path.name.index(".") + 1
    digit = "0" if path.name[first] != "0" else "1"
    path.rename(path.with_name(path.name[:first] + digit + path.name[first + 1 :]))
    assert find("x") is None
    fetch("x", log)


def test_a_file_that_others_may_write_is_not_executed(folder: Path, log: Path) -> None:
    fetch("x", log).chmod(0o666)
    assert find("x") is None
    fetch("x", log)
    assert log.read_text().split() == ["x", "x"]


# --- eviction --------------------------------------------------------------------------------------------------------


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_least_recently_used_go_first(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(content("x"))
    folder = use(monkeypatch, cache_dir=tmp_path / "cache", cache_bytes=3 * size)
    paths = {}
    for number, name in enumerate("abc"):
        paths[name] = fetch(name, log)
        age(paths[name], 1000 - number)
    assert find("a") is not None  # used again
    fetch("d", log)
    assert {name for name in "abcd" if find(name)} == {"a", "c", "d"}
    assert sum(path.stat().st_size for path in folder.glob("??/*.so")) <= 3 * size


def test_what_was_just_made_or_found_stays(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be about to load it."""
    use(monkeypatch, cache_dir=tmp_path / "cache", cache_bytes=1)
    for name in "abc":
        fetch(name, log)
    assert all(map(find, "abc"))


def test_what_a_killed_process_left_goes(folder: Path, log: Path) -> None:
    shard = fetch("x", log).parent
    left, young = shard / f"{'0' * 16}.part", shard / f"{'1' * 16}.part"
    for path in (left, young):
        path.touch()
    age(left, 1e6)
    fetch("y", log)
    assert (left.exists(), young.exists()) == (False, True)


# --- folders that cannot be used -------------------------------------------------------------------------------------


def _file(folder: Path) -> None:
    folder.touch()


def _of_another_user(folder: Path) -> None:
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)


def _open_to_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o707)


@pytest.mark.parametrize("spoil", [_file, _of_another_user, _open_to_a_group, _open_to_all])
def test_a_folder_that_is_not_ours_costs_one_warning(
    spoil: Callable[[Path], None], folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    if spoil is _of_another_user and os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # only root can give a folder away
    with pytest.warns(UserWarning, match="EPIFUSE_CACHE_DIR") as caught:
        path = fetch("x", log)
    assert len(caught) == 1
    assert folder not in path.parents
    assert fetch("x", log) == find("x") == path  # a warning would be an error here
    fetch("y", log)
    assert log.read_text().split() == ["x", "y"]


def test_a_user_without_a_home_gets_no_folder_here(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use(monkeypatch)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: Path("~/.cache/epifuse"))
    with pytest.warns(UserWarning, match="no home"):
        fetch("x", log)
    assert not Path("~").exists()


def test_the_folder_is_the_users_alone(folder: Path, log: Path) -> None:
    fetch("x", log)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_private_folder_that_was_cleaned_away_is_made_again(folder: Path, log: Path) -> None:
    folder.touch()
    with pytest.warns(UserWarning, match="EPIFUSE_CACHE_DIR"):
        path = fetch("x", log)
    shutil.rmtree(path.parents[1])
    again = fetch("x", log)
    shutil.rmtree(again.parent)
    assert find("x") is None
    fetch("x", log)
    assert log.read_text().split() == ["x", "x", "x"]


@pytest.fixture(params=["size=64k", "nr_inodes=1"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk with no room for one file: a tmpfs, or where none can be mounted, a folder that refuses its last step."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"{request.param},mode=700", "tmpfs", disk]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if disk in Path(target).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    if not mounted:
        monkeypatch.setattr(os, "replace", refuse)
    yield disk
    if mounted:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_costs_one_warning(full_disk: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cache_dir=full_disk)
    with pytest.warns(UserWarning, match="No space left") as caught:
        path = fetch("x", log)
    assert len(caught) == 1
    assert full_disk not in path.parents
    assert fetch("x", log) == path
    fetch("y", log)
    assert log.read_text().split() == ["x", "y"]
    assert not list(full_disk.glob("??/*.*")), "nothing of what did not fit stays"


# --- a store that is only read ---------------------------------------------------------------------------------------


def test_a_read_only_store_is_looked_at_first_and_never_written(
    folder: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = fetch("x", log)
    mine = use(monkeypatch, cache_dir=tmp_path / "mine", cache_readonly=folder)
    before = sorted(folder.rglob("*"))
    assert fetch("x", log) == brought
    assert mine in fetch("y", log).parents
    damage(brought, "middle")
    assert mine in fetch("x", log).parents
    assert sorted(folder.rglob("*")) == before
    assert log.read_text().split() == ["x", "y", "x"]


@pytest.mark.parametrize("where", ["folder", "shard"])
def test_a_read_only_store_that_others_may_write_is_not_trusted(
    where: str, folder: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch("x", log)
    (folder if where == "folder" else path.parent).chmod(0o777)
    use(monkeypatch, cache_dir=tmp_path / "mine", cache_readonly=folder)
    if where == "folder":
        with pytest.warns(UserWarning, match="another user.*Set EPIFUSE_CACHE_READONLY"):
            assert find("x") is None
    assert find("x") is None


# --- threads and processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usable", [True, False])
def test_of_eight_threads_one_makes_each_file(
    usable: bool, folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not usable:
        folder.touch()
        monkeypatch.setattr(store, "_warned", {folder: "told"})
    start, failed = threading.Barrier(8), []

    def work() -> None:
        try:
            start.wait()
            for name in "abcde":
                fetch(name, log)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sorted(log.read_text().split()) == list("abcde")


@pytest.mark.parametrize("case", ["at_once", "killed_while_making", "killed_while_storing"])
def test_processes(case: str, tmp_path: Path) -> None:
    run(case, EPIFUSE_CACHE_DIR=tmp_path / "cache", TMPDIR=tmp_path)  # where the killed leave what they were at


def test_a_forked_child_removes_nothing_of_its_parents(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.touch()  # so that the process works in a folder of its own
    private = run("forked", EPIFUSE_CACHE_DIR=cache).strip()
    assert private
    assert not Path(private).exists()


@pytest.mark.slow
def test_killed_processes_and_damaged_files_harm_no_other(whole_sweeps: bool, tmp_path: Path) -> None:
    run("chaos", "60" if whole_sweeps else "10", EPIFUSE_CACHE_DIR=tmp_path / "cache", TMPDIR=tmp_path)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that another user can reach, which `tmp_path` is not."""
    made = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    made.chmod(0o755)
    yield made
    for path in (made, *made.iterdir()):
        path.chmod(0o700)
    shutil.rmtree(made)


@pytest.mark.parametrize("mode", [0o000, 0o500, 0o300])
def test_a_folder_that_cannot_be_used_costs_one_warning(mode: int, open_path: Path) -> None:
    cache = open_path / "cache"
    cache.mkdir()
    if os.geteuid() == 0:
        os.chown(cache, 12345, 12345)
    cache.chmod(mode)
    said, warning, *more = run("unprivileged", EPIFUSE_CACHE_DIR=cache).splitlines()
    assert said.startswith("made 2, warned 1, ")
    assert str(cache) not in said
    assert str(cache) in warning
    assert more == []


def test_a_store_that_root_filled_serves_a_user_who_may_read_it(open_path: Path, monkeypatch, log: Path) -> None:
    image = open_path / "image"
    image.mkdir(mode=0o755)
    use(monkeypatch, cache_dir=image)
    for name in "xy":
        fetch(name, log)
    before = sorted(image.rglob("*"))
    said = run("unprivileged", EPIFUSE_CACHE_READONLY=image, EPIFUSE_CACHE_DIR=open_path / "not there")
    assert said.splitlines() == [f"made 0, warned 0, {image}"]
    assert sorted(image.rglob("*")) == before
    image.chmod(0o700)
    if os.geteuid() == 0:
        said = run("unprivileged", EPIFUSE_CACHE_READONLY=image, EPIFUSE_CACHE_DIR=open_path / "not there")
        assert said.startswith("made 2, warned 2")
        assert "Permission denied" in said


# --- folders that hold other people's files ---------------------------------------------------------------------------

OTHERS = ("js/app.js", "ab/main.go", "ab/notes.json", "config/settings.json", "data/labels.json")


def test_files_of_others_are_neither_counted_nor_removed(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use(monkeypatch, cache_dir=tmp_path / "project", cache_bytes=1)
    for name in OTHERS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    folder.chmod(0o700)
    stored = fetch("one", log)  # evicts
    assert stock.held(folder).files == {".so": 1}
    assert stock.clear(folder, and_notes=True).files == {".so": 1}
    assert not stored.exists()
    assert all((folder / name).read_text() == "mine" for name in OTHERS)
    assert not (folder / "js" / "lock").exists()


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"EPIFUSE_CACHE_DIR must be a folder \(Could not determine home"):
        from_environment({"EPIFUSE_CACHE_DIR": "~nobody_of_this_name/x"})
    with pytest.raises(ArgumentError, match="EPIFUSE_CACHE_BYTES must be a whole number"):
        from_environment({"EPIFUSE_CACHE_BYTES": "9" * 5000})
