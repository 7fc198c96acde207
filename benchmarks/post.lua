-- Post files in rotation; print the figures as one JSON line at the end.
--   wrk … -s post.lua URL -- CONTENT_TYPE FILE…

local requests, at = {}, 0

function init(args)
    local content_type = table.remove(args, 1)
    for index, name in ipairs(args) do
        local file = assert(io.open(name, "rb"))
        local headers = { ["Content-Type"] = content_type }
        requests[index] = wrk.format("POST", nil, headers, file:read("*a"))
        file:close()
    end
end

function request()
    at = at % #requests + 1
    return requests[at]
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        'figures {"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p90_ms": %.4f, ' ..
        '"p99_ms": %.4f, "max_ms": %.4f, "errors": ' ..
        '{"status": %d, "connect": %d, "read": %d, "write": %d, "timeout": %d}}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3,
        latency:percentile(90) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
        errors.status, errors.connect, errors.read, errors.write, errors.timeout))
end
