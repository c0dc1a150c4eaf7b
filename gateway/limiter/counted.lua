-- Prepended to the scripts that write usage. A day of a tenant is a hash: row -> its counts, as words in the order of
-- gateway/core/usage.py; whole numbers below 2^53, so that arithmetic on them is exact.

local function numbers(words)
  local found = {}
  for number in string.gmatch(words or '', '%-?%d+') do
    found[#found + 1] = tonumber(number)
  end
  return found
end

-- Raises what is counted in a row by the difference between two counts of the same thing, '' for none. A day that has
-- as many rows as it may have takes no new ones: their counts go to the row that stands for others.
local function count(day, row, others, max_rows, expires_at, words, words_before)
  local after, before = numbers(words), numbers(words_before)
  local text = redis.call('HGET', day, row)
  if not text and redis.call('HLEN', day) >= tonumber(max_rows) then
    row = others
    text = redis.call('HGET', day, row)
  end
  local sums, changed = numbers(text), false
  for i, number in ipairs(after) do
    local more = number - (before[i] or 0)
    changed = changed or more ~= 0
    sums[i] = string.format('%.0f', (sums[i] or 0) + more)
  end
  if changed then
    redis.call('HSET', day, row, table.concat(sums, ' '))
    redis.call('PEXPIREAT', day, expires_at)
  end
end
