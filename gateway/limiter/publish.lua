-- Publishes what a configuration says about one tenant's limits. What was changed live stays, unless it is named.
-- KEYS: limits. ARGV: name of the scope to return to the configuration or '', then name and limits, as JSON, of each
-- scope that the configuration knows.

local function is_live(name)
  local text = redis.call('HGET', KEYS[1], name)
  return name ~= ARGV[1] and text and cjson.decode(text).source == 'live'
end

for i = 2, #ARGV, 2 do
  if not is_live(ARGV[i]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
