"""The Kubernetes operator: reconciles `PolarKVCluster` into managers and cache nodes."""
