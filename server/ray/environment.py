"""The environment that Ray needs for Weft. Imports no Ray: it reads these variables when it is imported."""

from typing import Final

SERVE: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # A replica that died before it answered, or whose engine is away for too long, loses no request: another takes it.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 503",
    # Any change of the replicas replaces HAProxy's processes; old ones end with their last stream, or after this.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""For Ray Serve's processes, which inherit it from the controller."""

RAY: Final = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
"""For every process of Ray. Whoever reaches a cluster without a token runs code on it."""
