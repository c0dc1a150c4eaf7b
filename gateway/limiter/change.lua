-- Changes some limits of one scope; it begins with what is in force for it.
-- KEYS: limits. ARGV: name of the scope, of what stands in where it has no limits of its own or '', and as JSON what
-- becomes different: null lifts a limit; the maximum number of scopes.
-- Returns the limits in force from now on as JSON, nothing when the tenant's are not published, or '' when the scope
-- would be one too many.

local found = redis.call('HMGET', KEYS[1], ARGV[1], ARGV[2], 'tenant')
if not found[3] then
  return false
end
if not found[1] and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then
  return ''
end
local limits = cjson.decode(found[1] or found[2] or '{}')
for name, value in pairs(cjson.decode(ARGV[3])) do
  local lifted = value == cjson.null or (type(value) == 'table' and next(value) == nil)
  limits[name] = not lifted and value or nil
end
limits.source = 'live'
local text = cjson.encode(limits)
redis.call('HSET', KEYS[1], ARGV[1], text)
return text
