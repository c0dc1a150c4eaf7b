-- Counts usage of one tenant that was kept in a gateway while Redis was away: each batch once, in order.
-- KEYS: the gateway's receipt, then a day's usage for each count. ARGV: number of the batch, milliseconds to remember
-- it for, most rows of a day, then for each count its row, the row of others, when its day expires, and its words.
-- Returns 1 counted | 0 it had been already.

if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then
  return 0
end
for i = 2, #KEYS do
  local at = 4 * i - 4
  count(KEYS[i], ARGV[at], ARGV[at + 1], ARGV[3], ARGV[at + 2], ARGV[at + 3], '')
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
