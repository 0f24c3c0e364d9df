#!/usr/bin/env bash
# Puts etcd, kube-apiserver, kube-controller-manager, kubectl and cert-manager's
# controllers into .bin. What is there in the wanted version stays.
#
# Prebuilt ones are tried first (setup-envtest), since that takes seconds; where the
# network does not give them, everything is built from the Go modules that
# hack/devcluster pins. kube-controller-manager and cert-manager are always built.
# JOIN_BUILD_CLUSTER=1 skips the try.
set -euo pipefail
cd "$(dirname "$0")/.."
. hack/versions.env
bin=$PWD/.bin
mkdir -p "$bin"
stamp=$bin/.cluster
want=$(cat hack/versions.env hack/devcluster/go.mod hack/devcluster/certmanager/*.go hack/build-cluster.sh | sha256sum | cut -c1-16)
programs=(etcd kube-apiserver kube-controller-manager kubectl cert-manager)

present() { for p in "$@"; do [ -x "$bin/$p" ] || return 1; done; }
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && present "${programs[@]}"; then exit 0; fi
rm -f "$stamp"

begun=$SECONDS
took() { echo "==> $1 ($((SECONDS - begun)) s)"; begun=$SECONDS; }

prebuilt() {
  [ -z "${JOIN_BUILD_CLUSTER:-}" ] || return 1
  echo "==> trying prebuilt etcd, kube-apiserver and kubectl ${KUBERNETES_VERSION} (60 s at most)"
  GOBIN=$bin timeout 45 go install "sigs.k8s.io/controller-runtime/tools/setup-envtest@$SETUP_ENVTEST_VERSION" 2>/dev/null || return 1
  local dir
  dir=$(timeout 15 "$bin/setup-envtest" use "${KUBERNETES_VERSION#v}" --bin-dir "$bin/envtest" -p path 2>/dev/null) || return 1
  local p
  for p in etcd kube-apiserver kubectl; do ln -sf "$dir/$p" "$bin/$p" || return 1; done
}

flags="-s -w"
for v in gitVersion="$KUBERNETES_VERSION" gitMajor="$(cut -d. -f1 <<<"${KUBERNETES_VERSION#v}")" gitMinor="$(cut -d. -f2 <<<"$KUBERNETES_VERSION")" gitTreeState=clean; do
  flags="$flags -X k8s.io/component-base/version.$v"
done
build() { # name, package, what to expect
  echo "==> building $1 from source (first time: $3)"
  rm -f "$bin/$1" # perhaps a link to a prebuilt one
  (cd hack/devcluster && CGO_ENABLED=0 GOFLAGS=-buildvcs=false go build -ldflags "$flags" -o "$bin/$1" "$2")
  took "built $1"
}

if prebuilt; then
  took "prebuilt programs fetched"
else
  took "prebuilt programs cannot be had here: building them"
  build etcd go.etcd.io/etcd/server/v3 "1 min"
  build kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver "5 min"
  build kubectl k8s.io/kubernetes/cmd/kubectl "1 min"
fi
build kube-controller-manager k8s.io/kubernetes/cmd/kube-controller-manager "2 min"
build cert-manager ./certmanager "3 min"
echo "$want" >"$stamp"
