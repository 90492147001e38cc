# SPDX-License-Identifier: Apache-2.0
"""Features: what is remembered, what a failure means, and what people get to read."""

import errno
import os
from collections.abc import Callable

import pytest

from dsecd.linux import feature, mechanisms
from dsecd.linux.feature import YES, Answer, Feature, FeatureMissing, no, unknown


def made(probe: Callable[[], Answer], since: str = "") -> Feature:
    return Feature("thing", since, "testing", probe, "Install it.")


def answers(*results: Answer | OSError) -> tuple[Callable[[], Answer], list[int]]:
    """A probe that gives these answers in turn, and the record of its calls."""
    calls: list[int] = []

    def probe() -> Answer:
        result = results[len(calls)]
        calls.append(1)
        if isinstance(result, OSError):
            raise result
        return result

    return probe, calls


@pytest.mark.parametrize("answer", [YES, no("absent")])
def test_conclusive_answer_is_asked_for_once(answer: Answer) -> None:
    probe, calls = answers(answer, unknown("asked twice"))
    thing = made(probe)
    assert [thing.check(), thing.check()] == [answer, answer]
    assert len(calls) == 1


def test_inconclusive_answer_is_asked_for_again() -> None:
    probe, _ = answers(unknown("busy"), YES)
    thing = made(probe)
    assert thing.check() == unknown("busy")
    assert thing.check() == YES


def test_again_forgets_what_is_known() -> None:
    """A program may be installed while the daemon runs."""
    probe, _ = answers(no("not installed"), YES)
    thing = made(probe)
    thing.check()
    assert thing.check(again=True) == YES
    assert thing.check() == YES


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_not_being_allowed_to_try_proves_nothing(number: int) -> None:
    probe, _ = answers(OSError(number, os.strerror(number)))
    assert made(probe).check().works is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENODEV])
def test_other_failures_are_an_absence_with_the_reason(number: int) -> None:
    probe, _ = answers(OSError(number, "mount thing: refused"))
    answer = made(probe).check()
    assert answer.works is False
    assert "mount thing: refused" in answer.reason


@pytest.mark.parametrize("answer", [no("is absent"), unknown("could not try")])
def test_require_raises_unless_it_works(answer: Answer) -> None:
    with pytest.raises(FeatureMissing) as caught:
        made(lambda: answer).require()
    assert str(caught.value) == f"thing: not supported here: {answer.reason}"
    assert (caught.value.name, caught.value.hint) == ("thing", "Install it.")
    made(lambda: YES).require()


def test_old_kernel_is_named_in_the_reason() -> None:
    thing = made(lambda: no("absent"), since="99.1")
    assert not thing.expected_here()
    with pytest.raises(FeatureMissing, match=rf"absent \(needs Linux 99\.1, this is {os.uname().release}\)"):
        thing.require()
    assert "needs Linux 99.1" in thing.status().reason
    assert made(lambda: no("absent"), since="2.6").status().reason == "absent"


def test_status_gives_advice_only_where_it_is_needed() -> None:
    assert made(lambda: Answer(True, "version 3")).status() == feature.FeatureStatus(
        "thing", "", "testing", True, "version 3", "")
    assert made(lambda: no("absent")).status().hint == "Install it."


@pytest.mark.parametrize(
    ("text", "version"),
    [("6.12.48+deb13-amd64", (6, 12)), ("5.10.0", (5, 10)), ("6.18", (6, 18)), ("2.6.36", (2, 6))],
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert feature.parse_version(text) == version


def test_no_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="next-20260101"):
        feature.parse_version("next-20260101")


def test_every_mechanism_can_be_reported() -> None:
    names = [item.name for item in mechanisms.MECHANISMS]
    assert len(set(names)) == len(names)
    for item in mechanisms.MECHANISMS:
        assert item.since == "" or feature.parse_version(item.since)
        assert item.why
        assert item.hint.endswith(".")
    assert mechanisms.by_name(names[0]) is mechanisms.MECHANISMS[0]
    with pytest.raises(KeyError):
        mechanisms.by_name("nonsense")


CRUN = """crun version 1.21
commit: 10269840aa07fb7e6b7e1acff6198692d8ff5c88
rundir: /run/crun
spec: 1.0.0
+SYSTEMD +SELINUX +APPARMOR +CAP +SECCOMP +EBPF +CRIU +WASM:wasmedge +YAJL
"""


@pytest.mark.parametrize(
    ("text", "version", "some"),
    [
        (CRUN, (1, 21), {"SECCOMP", "CAP", "WASM"}),
        ("crun version 1.8.1\n+SYSTEMD +CAP\n", (1, 8, 1), {"CAP"}),
        ("crun version 1.20.0.0.0.5-1b\n", (1, 20, 0, 0, 0, 5), set()),
    ],
)
def test_crun_version(text: str, version: tuple[int, ...], some: set[str]) -> None:
    found, features = mechanisms.crun_version(text)
    assert found == version
    assert some <= features


@pytest.mark.parametrize("text", ["", "runc version 1.1", "crun: unknown option\n"])
def test_not_crun(text: str) -> None:
    with pytest.raises(ValueError, match="no version"):
        mechanisms.crun_version(text)
