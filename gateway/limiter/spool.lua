-- Counts usage of one tenant that was kept in a gateway while Redis was away: each batch once, in order. The same tokens
-- count against the limits of their day, so that what a gateway granted by itself is not granted again.
-- KEYS: the gateway's receipt, then as rows.lua has it. ARGV: number of the batch, milliseconds to remember it for, then
-- as rows.lua has it.
-- Returns 1 counted | 0 it had been already.

if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then
  return 0
end
count_rows(2, 3, clock())
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
