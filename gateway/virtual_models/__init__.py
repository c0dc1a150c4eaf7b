"""Virtual models: names that clients use like models, each with a policy that chooses the member that answers.

A policy only decides (`policy.py`); `gateway.requests.route_runner` runs the members. A new policy is one class with
the settings of its section of the configuration, and an entry in `policies.py`.
"""
