-- Post files in rotation; print the figures as one JSON line at the end.
--   wrk … -s post.lua URL -- CONTENT_TYPE SKIP_S FILE…
-- With SKIP_S > 0, requests and seconds are those from SKIP_S after the first request to the end: a
-- window whose edges fall anywhere between answers. From the start, a server of W workers has on
-- average W answers half done at the end, which is 1 % of the 140 that a slow model gives in 10 s.

local ffi = require("ffi")
ffi.cdef("typedef struct { long s; long ns; } moment; int clock_gettime(int, moment *);")
local CLOCK_MONOTONIC = 1

local function now()
    local moment = ffi.new("moment")
    ffi.C.clock_gettime(CLOCK_MONOTONIC, moment)
    return tonumber(moment.s) + tonumber(moment.ns) / 1e9
end

local requests, at, threads = {}, 0, {}

function setup(thread)
    table.insert(threads, thread)
end

function init(args)
    local content_type = table.remove(args, 1)
    local skip_s = tonumber(table.remove(args, 1))
    for index, name in ipairs(args) do
        local file = assert(io.open(name, "rb"))
        local headers = { ["Content-Type"] = content_type }
        requests[index] = wrk.format("POST", nil, headers, file:read("*a"))
        file:close()
    end
    counted, counts_from = 0, 0 -- global: `done` reads them through the thread
    if skip_s > 0 then
        counts_from = now() + skip_s
        -- Without this function wrk does not call into Lua for an answer.
        function response(status)
            if status < 400 and now() >= counts_from then
                counted = counted + 1
            end
        end
    end
end

function request()
    at = at % #requests + 1
    return requests[at]
end

function done(summary, latency)
    local ended = now()
    local errors, count, seconds = summary.errors, summary.requests, summary.duration / 1e6
    local counts_from = threads[1]:get("counts_from")
    if counts_from > 0 then
        -- Failures are taken off by the reader, who knows of no window.
        count = threads[1]:get("counted") + errors.status
        seconds = ended - counts_from
    end
    io.write(string.format(
        'figures {"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p90_ms": %.4f, ' ..
        '"p99_ms": %.4f, "max_ms": %.4f, "errors": ' ..
        '{"status": %d, "connect": %d, "read": %d, "write": %d, "timeout": %d}}\n',
        count, seconds, latency:percentile(50) / 1e3,
        latency:percentile(90) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
        errors.status, errors.connect, errors.read, errors.write, errors.timeout))
end
