# SPDX-License-Identifier: Apache-2.0
"""From what a user denies to a profile: nothing but paths gets in, and what leads to a denied path is held."""

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dsecd.backends import policy
from dsecd.linux import apparmor
from dsecd.linux.proc import ProcessFailed
from libdsec.types import AppArmor
from tests.support.source import ROOT

SYSTEM = Path("/etc/apparmor.d")

#: Names of one to three characters, as they may stand in a pattern, and some with a meaning.
_name = st.from_regex(r"\A[A-Za-z0-9_.][A-Za-z0-9_+:=@~% .-]{0,3}\Z").filter(lambda text: text not in (".", ".."))
_named = _name | st.sampled_from(["usr", "bin", "sbin", "lib", "lib64", "var", "run", "lock", "srv"])
_globbed = _named | st.from_regex(r"\A[ab]?(\*|\*\*|\?)[ab]?(\*|\?)?[ab]?\Z")


@st.composite
def patterns(draw: st.DrawFn) -> str:
    return "/" + "/".join([draw(_named), *draw(st.lists(_globbed, max_size=4))])


@st.composite
def files_of(draw: st.DrawFn) -> tuple[str, str]:
    """A pattern, and the path of something that it names, made by putting characters for its wildcards."""
    pattern = draw(patterns())
    one, some = st.sampled_from("abx"), st.text("abx", min_size=1, max_size=2)
    many = st.lists(some, min_size=1, max_size=3).map("/".join)
    path = re.sub(
        r"\*\*+|\*|\?",
        lambda wild: draw(one if wild[0] == "?" else many if wild[0].startswith("**") else some),
        pattern,
    )
    return pattern, path


def matcher(rule: str) -> re.Pattern[str]:
    """A path of a profile as a regular expression, by the words of apparmor.d(5), "GLOBBING"."""
    text = re.escape(rule).replace(r"\{,/,/\*\*\}", "(|/|/.+)").replace(r"\{,/\}", "/?")
    return re.compile(text.replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]"), re.DOTALL)


def denied(asked: AppArmor, permission: str) -> list[re.Pattern[str]]:
    found = [re.fullmatch(r'deny "([^"]*)" ([a-z]+),', rule) for rule in policy.rules(asked)]
    return [matcher(match[1]) for match in found if match and permission in match[2]]


@settings(deadline=None)
@given(files_of())
def test_what_a_pattern_names_is_denied_with_all_below(case: tuple[str, str]) -> None:
    pattern, path = case
    for asked, permission in ((AppArmor(deny_write=(pattern,)), "w"), (AppArmor(deny_read=(pattern,)), "r")):
        for place in (path, f"{path}/", f"{path}/x", f"{path}/x/y/"):
            assert any(rule.fullmatch(place) for rule in denied(asked, permission)), place


@settings(deadline=None)
@given(files_of(), st.booleans())
def test_every_directory_above_is_held_in_its_place(case: tuple[str, str], writing: bool) -> None:
    pattern, path = case
    asked = AppArmor(deny_write=(pattern,)) if writing else AppArmor(deny_read=(pattern,))
    # Renaming asks for reading and writing of what is renamed (security/apparmor/lsm.c, apparmor_path_rename):
    # a denial of either holds it.
    rules = [*denied(asked, "w"), *denied(asked, "r")]
    parts = path.split("/")[1:]
    for length in range(1, len(parts)):
        above = "/" + "/".join(parts[:length])
        # AppArmor names a directory with a slash at its end; renaming it takes the right to write it.
        assert any(rule.fullmatch(f"{above}/") for rule in rules), above


@settings(deadline=None)
@given(patterns())
def test_spellings_lead_to_one_another(pattern: str) -> None:
    found = policy.spellings(pattern)
    assert found[0] == pattern
    assert all(set(policy.spellings(other)) == set(found) for other in found)


@pytest.mark.parametrize(
    ("pattern", "others"),
    [
        ("/bin/bash", {"/usr/bin/bash"}),
        ("/usr/lib64/ld.so", {"/lib64/ld.so"}),
        ("/bin", {"/usr/bin"}),
        ("/var/run/secret", {"/run/secret"}),
        ("/var/lock/x", {"/run/lock/x", "/var/run/lock/x"}),
        ("/binary/x", set()),
        ("/usr/share/x", set()),
    ],
)
def test_merged_directories_are_known_by_both_names(pattern: str, others: set[str]) -> None:
    assert set(policy.spellings(pattern)) == {pattern} | others


def test_files_beside_what_a_wildcard_stands_for_can_be_made() -> None:
    rules = denied(AppArmor(deny_write=("/people/*/answers",)), "w")
    assert not any(rule.fullmatch("/people/notes") for rule in rules)
    assert any(rule.fullmatch("/people/bob/") for rule in rules)
    assert any(rule.fullmatch("/people") for rule in rules), "a symbolic link could take its place"


# --- what is no path

_BAD = ["\n", '"', ",", "{", "}", "[", "]", "\\", "^", "#", "$", "(", "'", "\0", "\t", "\x7f", "é", "@{HOME}", "<", ">"]


@settings(deadline=None)
@given(patterns(), st.sampled_from(_BAD), st.data())
def test_no_character_with_a_meaning_gets_in(pattern: str, bad: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(pattern)))
    for field in ("deny_write", "deny_read"):
        with pytest.raises(ValidationError):
            AppArmor.model_validate({field: [pattern[:at] + bad + pattern[at:]]})


@pytest.mark.parametrize(
    "pattern",
    ["", "a", "/", "//", "/a/", "/a//b", "/./a", "/a/.", "/../a", "/a/..", "/a/../b", "/*", "/**", "/a*/b", "/?",
     "/a\n", "/a x}", "/a" + "b" * 1024],
)  # fmt: skip
def test_what_is_no_path_with_a_fixed_beginning_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError):
        AppArmor(deny_write=(pattern,))


@settings(deadline=None)
@given(st.text(max_size=30))
def test_whatever_is_accepted_stays_within_its_quotes(text: str) -> None:
    try:
        asked = AppArmor(deny_write=(f"/srv/{text}",))
    except ValidationError:
        return
    profile = policy.profile("dsec-x", asked)
    assert profile.count('"') % 2 == 0
    assert re.fullmatch(r'( *(deny "[^"\n]*" [a-z]+|[^"\n]*)[,{}>]?\n)*', profile.replace("\n\n", "\n"))
    assert profile.count("\n}") == 1


@pytest.mark.parametrize("families", [("unix",), ("packet",), ("inet,",), ("all",)])
def test_families_are_those_that_a_sandbox_has_and_can_do_without(families: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        AppArmor.model_validate({"deny_sockets": families})


# --- names

def test_equal_policies_have_one_name_and_others_another() -> None:
    one = AppArmor(deny_write=("/a", "/b"), deny_sockets=("inet", "inet6"))
    same = AppArmor(deny_write=("/b", "/a", "/a"), deny_sockets=("inet6", "inet"))
    assert policy.digest(one) == policy.digest(same)
    raw = AppArmor(allow_raw_sockets=True)
    others = [AppArmor(), AppArmor(deny_read=("/a", "/b")), AppArmor(deny_write=("/a",)), raw]
    assert len({policy.digest(other) for other in [one, *others]}) == 5


def test_daemons_of_one_host_do_not_remove_each_others_profiles() -> None:
    assert policy.prefix("/var/lib/dsec") != policy.prefix("/srv/dsec")
    assert not policy.DEFAULT.startswith(policy.prefix("/var/lib/dsec"))


# --- the compiler

needs_parser = pytest.mark.skipif(
    shutil.which("apparmor_parser", path="/usr/sbin:/sbin") is None, reason="apparmor_parser is not installed"
)


@needs_parser
@settings(max_examples=25, deadline=None)
@given(st.lists(patterns(), min_size=1, max_size=2), st.booleans())
def test_whatever_is_accepted_compiles(found: list[str], raw: bool) -> None:
    asked = AppArmor(deny_write=tuple(found), deny_read=tuple(found[:1]), allow_raw_sockets=raw)
    text = policy.profile("dsec-x", asked)
    assert apparmor.compile_profile(text, SYSTEM, [ROOT / "apparmor"])


@needs_parser
@pytest.mark.parametrize("name", ["dsec-sandbox", "dsecd"])
def test_profiles_of_the_package_compile(name: str) -> None:
    assert apparmor.compile_profile((ROOT / "apparmor" / name).read_text(), SYSTEM, [ROOT / "apparmor"])


@needs_parser
def test_a_policy_that_takes_the_compiler_for_ever_ends_in_time() -> None:
    hard = tuple(f"/srv/**{letter}x**{letter}y" for letter in "abcdefghijklmnop")
    with pytest.raises(ProcessFailed):
        apparmor.compile_profile(policy.profile("dsec-x", AppArmor(deny_write=hard)), SYSTEM, [ROOT / "apparmor"])
