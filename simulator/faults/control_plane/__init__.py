"""The control plane's decisions under virtual time: membership, reconciler, orders and autoscalers with
replicas that fail, routers that come and go, a demand that changes, and a control plane that dies."""
