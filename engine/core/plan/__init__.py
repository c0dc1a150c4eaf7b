"""Plans steps without changing the state: what is computed, admitted, preempted, loaded and evicted, within budgets of
time, pages and memory. Imports the state and policy."""
