-- Changes the marks of a line or a task on trial. KEYS: batch, holders.
-- ARGV: task, fence, the line's position or the task again, and one of
--   begin: its process is about to run it. The mark is the fence of the lease;
--   end: its process outlived it, and the mark goes;
--   keep, and a token: its process outlived it, but its failure counts against it. The mark stays, as FENCE:TOKEN.
-- begin returns {how many processes were lost with the task, how many other marks there are}; nothing: the lease is
-- lost, and nothing is marked. Repeating a call changes nothing.

local job, holders = unpack(KEYS)
local task, fence, mark = ARGV[1], ARGV[2], 'mark:' .. ARGV[3]
if ARGV[4] == 'begin' then
  if not holds(holders, task, fence) then
    return {}
  end
  return { #words_of(job, 'lost:' .. task), add_word(job, mark, fence) - 1 }
end
drop_word(job, mark, fence)
if ARGV[4] == 'keep' and holds(holders, task, fence) then
  add_word(job, mark, fence .. ':' .. ARGV[5])
end
return {}
