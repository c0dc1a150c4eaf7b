"""The scheduling core, in the standard library alone: state, plans of steps, and the policy that orders requests."""
