# SPDX-License-Identifier: Apache-2.0
"""Reading the configuration: overriding by files, every fault at once with file and key, ids that collide."""

from pathlib import Path

import pytest

from dsecd.config import RANGE_IDS, Config, ConfigError, check_ids, load


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def faults(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file)
    return caught.value.faults


def test_nothing_set_gives_the_defaults(tmp_path: Path):
    config = load(write(tmp_path / "dsecd.toml", ""))
    assert config == Config()
    assert config.socket == Path("/run/dsec/dsecd.sock")
    assert config.uid_base % RANGE_IDS == 0
    assert config.uid_base > 600_100_000  # the last id that useradd gives out by default, login.defs(5)
    assert config.uid_base + config.uid_ranges * RANGE_IDS < 1 << 31


def test_later_files_override_single_keys(tmp_path: Path):
    main = write(
        tmp_path / "d.toml", 'state_dir = "/a"\nlog_level = "debug"\n[limits]\nmax_request_bytes = 100000'
    )
    write(tmp_path / "d.toml.d" / "20.toml", 'state_dir = "/c"')
    write(tmp_path / "d.toml.d" / "10.toml", 'state_dir = "/b"\n[limits]\nmax_connections_per_user = 20')
    write(tmp_path / "d.toml.d" / "30.conf", 'state_dir = "/not-read"')
    config = load(main)
    assert (config.state_dir, config.log_level) == (Path("/c"), "debug")
    assert (config.limits.max_request_bytes, config.limits.max_connections_per_user) == (100_000, 20)


def test_every_fault_is_told_with_its_file_and_key(tmp_path: Path):
    main = write(
        tmp_path / "d.toml",
        'state_dir = "relative"\nsocket_mode = "rw"\nlog_levle = "debug"\nuid_base = 65537',
    )
    extra = write(
        tmp_path / "d.toml.d" / "10.toml", 'cgroup_root = "../x"\n[limits]\nmax_request_bytes = 1\nbogus = 2'
    )
    broken = write(tmp_path / "d.toml.d" / "20.toml", "state_dir = ")
    found = faults(main)
    assert sorted(f.split(": ")[:2] for f in found) == sorted(
        [
            [str(main), "state_dir"],
            [str(main), "socket_mode"],
            [str(main), "log_levle"],
            [str(main), "uid_base"],
            [str(extra), "cgroup_root"],
            [str(extra), "limits.max_request_bytes"],
            [str(extra), "limits.bogus"],
            [str(broken), "Invalid value (at end of document)"],
        ]
    )
    assert f"{main}: log_levle: unknown key" in found
    assert f"{main}: state_dir: must be an absolute path without '..', got 'relative'" in found


def test_a_fault_between_keys_names_one_of_them(tmp_path: Path):
    main = write(tmp_path / "d.toml", "uid_base = 65537")
    assert faults(main) == [f"{main}: uid_base: must be a multiple of 65536, got 65537"]
    main = write(tmp_path / "d.toml", "uid_ranges = 65000")
    assert faults(main) == [f"{main}: uid_ranges: 65000 ranges from 671088640 go beyond 32-bit ids"]


def test_a_named_file_must_exist(tmp_path: Path):
    assert faults(tmp_path / "none.toml") == [f"{tmp_path}/none.toml: no such file"]


@pytest.mark.parametrize("text", ["0o660", '"0660"', '"660"'])
def test_socket_mode_is_octal_either_way(tmp_path: Path, text: str):
    assert load(write(tmp_path / "d.toml", f"socket_mode = {text}")).socket_mode == 0o660


def test_a_socket_path_that_the_kernel_cannot_take_is_refused(tmp_path: Path):
    main = write(tmp_path / "d.toml", f'socket = "/{"x" * 107}"')
    assert faults(main) == [f"{main}: socket: must be at most 107 bytes long (unix(7)), has 108"]
    load(write(tmp_path / "d.toml", f'socket = "/{"x" * 106}"'))


def test_ids_used_by_others_are_found(tmp_path: Path):
    config = Config(uid_base=2 * RANGE_IDS, uid_ranges=2)  # 131072 to 262143
    write(
        tmp_path / "passwd",
        "root:x:0:0::/root:/bin/sh\nnear:x:131071:1::/:/bin/sh\nin:x:131072:1::/:/bin/sh\nbad:x:\n",
    )
    write(tmp_path / "subuid", "a:100000:31072\nb:100000:31073\nc:262144:65536\nd:262143:1\n")
    assert [line.split(" has ")[0] for line in check_ids(config, tmp_path)] == [
        f"{tmp_path}/passwd: in",
        f"{tmp_path}/subuid: b",
        f"{tmp_path}/subuid: d",
    ]
