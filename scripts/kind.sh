#!/usr/bin/env bash
# kind.sh: a Kubernetes in Docker with the project's image in it, for `make test-cluster` and for trying things out.
#
# It stays until `kind delete cluster --name polarkv`; run again, it brings the image up to date.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

name=polarkv
image=docker.io/polarkv/polarkv:test
base=$(sed -n 's/^ARG BASE=//p' images/Containerfile)
kubeconfig="$CACHE/kind-kubeconfig"

command -v docker >/dev/null || fail "needs Docker; without it, 'make test-cluster' brings up a Kubernetes of its own"
command -v kind >/dev/null || fail "needs kind (https://kind.sigs.k8s.io): 'go install sigs.k8s.io/kind@latest', or your package manager"
docker info >/dev/null 2>&1 || fail "Docker does not answer: start it, or let this user speak to it"

mkdir -p "$CACHE"
if kind get clusters 2>/dev/null | grep -qx "$name"; then
    kind get kubeconfig --name "$name" >"$kubeconfig"
else
    # Two nodes for cache nodes to spread over.
    kind create cluster --name "$name" --wait 180s --kubeconfig "$kubeconfig" --config - <<'CONFIG'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
  - role: control-plane
  - role: worker
  - role: worker
CONFIG
fi
docker build --file images/Containerfile --tag "$image" .
docker pull --quiet "$base" >/dev/null
kind load docker-image --name "$name" "$image" "$base"
say "ready: KUBECONFIG=$kubeconfig make test-cluster"
