"""The only room that changes the state: it admits requests, applies commands, commits plans and absorbs their results.
Imports plan, the state and what is below."""
