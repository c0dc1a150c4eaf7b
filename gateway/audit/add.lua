-- Adds an entry to the audit log and drops what need not be kept. However often it runs for one token, it adds one entry.
-- KEYS: stream of entries; list of the ids of those that tenants' administrators caused, oldest first; id of the entry
-- that was added for the token.
-- ARGV: the entry; id of the one that it replaces, or ''; '1' if a tenant's administrator caused it; most entries; most
-- of tenants' administrators; lowest id to keep; seconds for which the token is remembered.
-- Returns the new id.

local stream, of_tenants, added = unpack(KEYS)
local entry, replaces, is_of_tenant, most, most_of_tenants, oldest, seconds = unpack(ARGV)

local known = redis.call('GET', added)
if known then
  return known
end
local id = redis.call('XADD', stream, '*', 'entry', entry)
redis.call('SET', added, id, 'EX', seconds)
if replaces ~= '' then
  redis.call('XDEL', stream, replaces)
  redis.call('LREM', of_tenants, -1, replaces)
end
if is_of_tenant == '1' then
  redis.call('RPUSH', of_tenants, id)
end
while redis.call('LLEN', of_tenants) > tonumber(most_of_tenants) do
  redis.call('XDEL', stream, redis.call('LPOP', of_tenants))
end
redis.call('XTRIM', stream, 'MAXLEN', most)
redis.call('XTRIM', stream, 'MINID', oldest)
return id
