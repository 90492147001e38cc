# SPDX-License-Identifier: Apache-2.0
"""Images in the state database: what exists, its names, who holds it, and how often each object is needed.

What belongs here: tables and the functions that run in one transaction each.  What does not: files.  Every function
takes the connection of the caller's transaction, so that a sandbox and its hold on an image appear together.

An image's row goes through three states.  `publishing`: being counted in, visible to nobody.  `published`.
`removing`: being counted out, visible to nobody.  `counted` tells how many entries of its manifest are in the reference
counts, so a daemon that dies in the middle knows where to go on.
"""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dsecd.core.images.names import Reference
from libdsec.errors import Conflict, NotFound
from libdsec.types import ImageConfig, ImageInfo

SCHEMA = """
CREATE TABLE images (
    digest TEXT PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('publishing', 'published', 'removing')),
    import_id TEXT NOT NULL,
    counted INTEGER NOT NULL,
    objects INTEGER NOT NULL,
    objects_new INTEGER NOT NULL,
    bytes_new INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    metadata_bytes INTEGER NOT NULL,
    prefix TEXT NOT NULL,
    config TEXT NOT NULL,
    source TEXT NOT NULL,
    manifest_digest TEXT,
    created_at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE image_names (
    name TEXT NOT NULL,
    tag TEXT NOT NULL,
    digest TEXT NOT NULL REFERENCES images (digest),
    PRIMARY KEY (name, tag)
) WITHOUT ROWID;
CREATE INDEX image_names_digest ON image_names (digest);

CREATE TABLE image_holders (
    digest TEXT NOT NULL REFERENCES images (digest),
    holder TEXT NOT NULL,
    PRIMARY KEY (digest, holder)
) WITHOUT ROWID;
CREATE INDEX image_holders_holder ON image_holders (holder);

CREATE TABLE objects (
    digest BLOB PRIMARY KEY,
    refs INTEGER NOT NULL CHECK (refs >= 0)
) WITHOUT ROWID;
CREATE INDEX objects_unused ON objects (digest) WHERE refs = 0;
"""

#: Objects counted in or out per transaction, so that no other write waits long.
COUNT_STEP = 2000


@dataclass(frozen=True)
class Row:
    """An image as the publish and remove plans need it."""

    digest: str
    state: str
    import_id: str
    counted: int


# --- publishing and removing -------------------------------------------------------------------------------------


def row(db: sqlite3.Connection, digest: str) -> Row | None:
    """The row of a whole digest, in whatever state."""
    found = db.execute("SELECT digest, state, import_id, counted FROM images WHERE digest = ?", (digest,)).fetchone()
    return None if found is None else Row(*found)


def unfinished(db: sqlite3.Connection) -> list[Row]:
    """Rows that a dead daemon left half way."""
    found = db.execute("SELECT digest, state, import_id, counted FROM images WHERE state != 'published'")
    return [Row(*values) for values in found]


def begin(db: sqlite3.Connection, info: ImageInfo, import_id: str) -> None:
    """Enter an image as `publishing`, nothing counted yet."""
    db.execute(
        "INSERT INTO images VALUES (?, 'publishing', ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            bare(info.digest), import_id, info.objects, info.objects_new, info.bytes_new, info.entries,
            info.size_bytes, info.metadata_bytes, info.prefix, info.config.model_dump_json(), info.source,
            info.manifest_digest, info.created_at.timestamp(),
        ),
    )


def count_in(db: sqlite3.Connection, digest: str, counted: int, objects: Sequence[bytes]) -> None:
    """Add one reference to each of `objects`, the manifest's entries from `counted` on."""
    db.executemany(
        "INSERT INTO objects VALUES (?, 1) ON CONFLICT (digest) DO UPDATE SET refs = refs + 1",
        ((item,) for item in objects),
    )
    db.execute("UPDATE images SET counted = ? WHERE digest = ?", (counted + len(objects), digest))


def count_out(db: sqlite3.Connection, digest: str, counted: int, objects: Sequence[bytes]) -> None:
    """Take one reference from each of `objects`, the manifest's entries from `counted` on."""
    db.executemany("UPDATE objects SET refs = refs - 1 WHERE digest = ?", ((item,) for item in objects))
    db.execute("UPDATE images SET counted = ? WHERE digest = ?", (counted, digest))


def publish(db: sqlite3.Connection, digest: str, name: tuple[str, str]) -> str | None:
    """Make an image visible under a name; the digest that had the name before, if it was another."""
    db.execute("UPDATE images SET state = 'published' WHERE digest = ?", (digest,))
    return set_name(db, digest, name)


def set_name(db: sqlite3.Connection, digest: str, name: tuple[str, str]) -> str | None:
    """Move a name to an image; the digest that had it before, if it was another."""
    before = db.execute("SELECT digest FROM image_names WHERE name = ? AND tag = ?", name).fetchone()
    db.execute("INSERT OR REPLACE INTO image_names VALUES (?, ?, ?)", (*name, digest))
    return None if before is None or before[0] == digest else str(before[0])


def begin_removal(db: sqlite3.Connection, digest: str) -> bool:
    """Turn a published image that nothing names or holds into `removing`; whether that was so."""
    done = db.execute(
        "UPDATE images SET state = 'removing' WHERE digest = ?1 AND state = 'published'"
        " AND NOT EXISTS (SELECT 1 FROM image_names WHERE digest = ?1)"
        " AND NOT EXISTS (SELECT 1 FROM image_holders WHERE digest = ?1)",
        (digest,),
    )
    return done.rowcount == 1


def begin_undo(db: sqlite3.Connection, digest: str) -> None:
    """Turn an image that never got published into `removing`."""
    db.execute("UPDATE images SET state = 'removing' WHERE digest = ? AND state = 'publishing'", (digest,))


def forget(db: sqlite3.Connection, digest: str) -> None:
    """Drop the row of an image that is counted out."""
    db.execute("DELETE FROM images WHERE digest = ? AND state = 'removing' AND counted = 0", (digest,))


def unused_objects(db: sqlite3.Connection, limit: int) -> list[bytes]:
    """Objects that no image needs any more."""
    return [found for (found,) in db.execute("SELECT digest FROM objects WHERE refs = 0 LIMIT ?", (limit,))]


def drop_objects(db: sqlite3.Connection, objects: Sequence[bytes]) -> None:
    """Forget objects whose files are gone."""
    db.executemany("DELETE FROM objects WHERE digest = ? AND refs = 0", ((item,) for item in objects))


def unused_images(db: sqlite3.Connection) -> list[str]:
    """Published images that have lost their last name and their last holder."""
    found = db.execute(
        "SELECT digest FROM images AS i WHERE state = 'published'"
        " AND NOT EXISTS (SELECT 1 FROM image_names WHERE digest = i.digest)"
        " AND NOT EXISTS (SELECT 1 FROM image_holders WHERE digest = i.digest)"
    )
    return [digest for (digest,) in found]


# --- holders -----------------------------------------------------------------------------------------------------


def hold(db: sqlite3.Connection, digest: str, holder: str) -> None:
    """Keep an image from removal on behalf of `holder` (a sandbox's or snapshot's name); may be repeated.

    Raises NotFound if it is not there any more.
    """
    found = row(db, bare(digest))
    if found is None or found.state != "published":
        raise NotFound(f"use image sha256:{bare(digest)[:12]}: it was removed")
    db.execute("INSERT OR IGNORE INTO image_holders VALUES (?, ?)", (bare(digest), holder))


def release(db: sqlite3.Connection, digest: str, holder: str) -> None:
    """Undo `hold`; may be repeated.  An image left without names is removed by the next `remove_unused`."""
    db.execute("DELETE FROM image_holders WHERE digest = ? AND holder = ?", (bare(digest), holder))


def release_all(db: sqlite3.Connection, holder: str) -> None:
    """Undo every `hold` of `holder`."""
    db.execute("DELETE FROM image_holders WHERE holder = ?", (holder,))


def holders(db: sqlite3.Connection, digest: str) -> tuple[str, ...]:
    found = db.execute("SELECT holder FROM image_holders WHERE digest = ? ORDER BY holder", (digest,))
    return tuple(holder for (holder,) in found)


def held(db: sqlite3.Connection) -> list[str]:
    """Every digest that has a holder."""
    return [digest for (digest,) in db.execute("SELECT DISTINCT digest FROM image_holders")]


# --- names -------------------------------------------------------------------------------------------------------


def find(db: sqlite3.Connection, reference: Reference) -> str:
    """The whole digest a reference stands for.  Raises NotFound, Conflict if it fits several images."""
    if reference.name is not None and reference.tag is not None:
        found = db.execute(
            "SELECT digest FROM image_names WHERE name = ? AND tag = ?", (reference.name, reference.tag)
        ).fetchall()
    elif reference.name is not None:
        found = db.execute(
            "SELECT DISTINCT n.digest FROM image_names AS n JOIN images AS i ON i.digest = n.digest"
            " WHERE n.name = ? AND (n.digest = ?2 OR i.manifest_digest = 'sha256:' || ?2)",
            (reference.name, reference.digest),
        ).fetchall()
    else:
        assert reference.digest is not None
        # A range of the primary key, which LIKE would not use.
        found = db.execute(
            "SELECT digest FROM images WHERE state = 'published' AND digest >= ? AND digest < ? LIMIT 3",
            (reference.digest, reference.digest + "g"),
        ).fetchall()
    if not found:
        raise NotFound(f"image '{reference}': no such image", hint="see 'dsecctl image ls'")
    if len(found) > 1:
        raise Conflict(f"image '{reference}': several images fit", hint="give more of the digest")
    return str(found[0][0])


def names(db: sqlite3.Connection, digest: str) -> tuple[str, ...]:
    found = db.execute("SELECT name, tag FROM image_names WHERE digest = ? ORDER BY name, tag", (digest,))
    return tuple(f"{name}:{tag}" for name, tag in found)


def untag(db: sqlite3.Connection, reference: Reference, *, force: bool) -> str:
    """Take away the name a reference gives, or the only name of the digest it gives; the digest.

    Raises NotFound.  Raises Conflict if holders would be left with an image that has no name, or the digest has several
    names, unless `force`: then all go, and the image's files go with its last holder.
    """
    digest = find(db, reference)
    known = names(db, digest)
    held = holders(db, digest)
    dropped = (str(reference),) if reference.tag is not None else known
    if not force and len(dropped) > 1:
        raise Conflict(
            f"remove image '{reference}': it has {len(known)} names: {', '.join(known[:8])}",
            hint="remove the names one by one, or use force", names=list(known),
        )
    if not force and held and set(dropped) >= set(known):
        more = f" and {len(held) - 8} more" if len(held) > 8 else ""
        raise Conflict(
            f"remove image '{reference}': used by {', '.join(held[:8])}{more}",
            hint="remove what uses it first", holders=list(held),
        )
    for name in dropped:
        db.execute("DELETE FROM image_names WHERE name = ? AND tag = ?", tuple(name.rsplit(":", 1)))
    return digest


# --- the wire form -----------------------------------------------------------------------------------------------

_COLUMNS = (
    "digest, source, manifest_digest, prefix, config, created_at, entries, size_bytes, metadata_bytes, objects,"
    " objects_new, bytes_new"
)


def info(db: sqlite3.Connection, digest: str) -> ImageInfo:
    """One published image.  Raises NotFound."""
    found = db.execute(
        f"SELECT {_COLUMNS} FROM images WHERE digest = ? AND state = 'published'", (digest,)  # columns are ours
    ).fetchone()
    if found is None:
        raise NotFound(f"image 'sha256:{digest[:12]}': no such image")
    return _info(db, found)


def infos(db: sqlite3.Connection) -> tuple[ImageInfo, ...]:
    """All published images, oldest first."""
    found = db.execute(f"SELECT {_COLUMNS} FROM images WHERE state = 'published' ORDER BY created_at").fetchall()
    return tuple(_info(db, values) for values in found)


def _info(db: sqlite3.Connection, values: Sequence[object]) -> ImageInfo:
    fields = dict(zip(_COLUMNS.split(", "), values, strict=True))
    digest = str(fields["digest"])
    return ImageInfo.model_validate({
        **fields, "digest": f"sha256:{digest}", "names": names(db, digest), "held_by": holders(db, digest),
        "config": ImageConfig.model_validate(json.loads(str(fields["config"]))),
        "created_at": datetime.fromtimestamp(float(str(fields["created_at"])), UTC),
    })


def bare(digest: str) -> str:
    """The hexadecimal digits of a digest with or without 'sha256:'."""
    return digest.removeprefix("sha256:")
