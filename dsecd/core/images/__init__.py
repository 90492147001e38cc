# SPDX-License-Identifier: Apache-2.0
"""Images: import, content-addressed objects, EROFS metadata images, names and references.

What belongs here: everything about image files on this host.  What does not: HTTP, sandboxes, and the OverlayFS mounts
made of images.

`store` is the face for the rest of the daemon.  `worker` is the process that reads sources: `tree` holds what it has
read, `tarstream`, `directory`, `bundle` and `pull` are the kinds of sources, `reader` the streams below them, `objects`
and `headers` write the result.  `records` is the database side, `publish` the steps that make a result visible.
"""
