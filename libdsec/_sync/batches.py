# SPDX-License-Identifier: Apache-2.0
# Made by tools/unasync.py from libdsec/_async; edit that.
"""Small files of a tree, many to a request: alone each is a request here, one to the agent and a process there.

Here: what goes together, and what of it has to go alone. Not here: walking a tree (``tree.py``), one file
(``contents.py``).

A batch is a short cut and nothing else. Whatever is out of the ordinary, with one file or with the whole request, is
given back to be transferred alone: resuming, holes, and errors that name a file are there.
"""

from __future__ import annotations

from libdsec._sync.contents import Contents
from libdsec._sync.primitives import in_thread
from libdsec.errors import DsecError
from libdsec.filetypes import MANY_BYTES, in_bytes
from libdsec.frames import Records
from libdsec.local import Entry, Found, Shelf, Tree, TreeReport, pack
from libdsec.options import guest_path


class Batches(Contents):
    """What a sandbox can do with many files at once."""

    def _put_together(
        self, top: str, path: str, entries: list[Entry], user: str | None, report: TreeReport
    ) -> list[Entry]:
        """Upload directories and small files of the tree ``top``; those that have to go alone."""
        packed = in_thread(pack, top, entries, MANY_BYTES)
        if packed.body:
            try:
                self.client.put_files(self.id, guest_path(path), packed.body, user=user)
            except DsecError:
                return entries
        for size in packed.taken:
            report.add_file(size)
        return packed.left

    def _get_together(
        self, local: Tree, path: str, found: list[Found], user: str | None, report: TreeReport
    ) -> list[Found]:
        """Download small files into the tree ``local``; those that have to go alone."""
        asked = [item for item in found if in_bytes(item[0]) is None]
        left = [item for item in found if in_bytes(item[0]) is not None]
        if not asked:
            return left
        names = [where for where, _ in asked]
        shelf = Shelf(local, names)
        try:
            with self.client.get_files(self.id, guest_path(path), names, user=user) as pieces:
                records = Records(MANY_BYTES)
                for piece in pieces:
                    for size in in_thread(shelf.put, list(records.feed(piece))):
                        report.add_file(size)
        except DsecError:
            pass  # what did not come is not on the shelf
        finally:
            shelf.close()
        return [item for item in asked if item[0] not in shelf.done] + left
