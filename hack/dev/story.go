package main

// Exit codes of bcd join --once that the story expects (docs/bcd.md).
const (
	pending = 3
	refused = 4
)

// forbidden is the exit code of kubectl approve for who lacks a right.
const forbidden = 3

// story is what the demo shows.
func story() []step {
	return []step{
		{
			explain: "A tenant is a namespace with a label. A pool is a policy for its nodes, and a token\nadmits machines into one pool: this one a single machine.",
			script: `kubectl create namespace factory
kubectl label namespace factory join.better-compute.dev/tenant=true
kubectl apply -f - <<YAML
apiVersion: join.better-compute.dev/v1alpha1
kind: FleetPool
metadata: {name: general, namespace: factory}
---
apiVersion: join.better-compute.dev/v1alpha1
kind: JoinToken
metadata: {name: rack-7, namespace: factory}
spec: {pool: general, ttl: 24h}
YAML
kubectl wait -n factory jointoken/rack-7 --for=condition=Ready --timeout=30s
kubectl get -n factory jointokens`,
			shows: []string{"rack-7"},
		},
		{script: secretOf("rack-7")},
		{
			explain: "The machine makes a key, proves that it has it, and joins by the token.",
			script:  `bcd join --bundle "$JOIN_BUNDLE" --token-file rack-7.token --state-dir machine-1 --once`,
		},
		{
			script: awaitOutput(`kubectl get -n factory fn`, "Active"),
			shows:  []string{"general"},
		},
		{
			explain: "The token is spent. Another machine is refused, and is not told why.",
			script:  `bcd join --bundle "$JOIN_BUNDLE" --token-file rack-7.token --state-dir machine-2 --once`,
			exit:    refused,
			shows:   []string{"Join refused"},
		},
		{
			explain: "The operator is told: in an Event of the tenant, and in the join service's log.",
			script:  awaitOutput(`kubectl get -n factory events`, "join-token:"),
			shows:   []string{"spent"},
		},
		{script: `grep -h "join-token:" ../log/joinsvc-*.log`, shows: []string{"spent"}},
		{
			explain: "In a pool with requireApproval a person decides about every machine. Bob may edit what\nis in the namespace; alice may approve the pool gpu.",
			script: `kubectl apply -f - <<YAML
apiVersion: join.better-compute.dev/v1alpha1
kind: FleetPool
metadata: {name: gpu, namespace: factory}
spec: {requireApproval: true}
---
apiVersion: join.better-compute.dev/v1alpha1
kind: JoinToken
metadata: {name: gpu-1, namespace: factory}
spec: {pool: gpu, uses: 2, ttl: 24h}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: editor, namespace: factory}
rules:
- {apiGroups: [join.better-compute.dev], resources: [joinrequests], verbs: [get, list, watch, update, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: gpu-approver, namespace: factory}
rules:
- {apiGroups: [join.better-compute.dev], resources: [fleetpools], resourceNames: [gpu], verbs: [approve]}
YAML
kubectl create rolebinding -n factory editors --role=editor --user=bob --user=alice
kubectl create rolebinding -n factory gpu-approvers --role=gpu-approver --user=alice
kubectl wait -n factory jointoken/gpu-1 --for=condition=Ready --timeout=30s`,
		},
		{script: secretOf("gpu-1")},
		{
			explain: "The machine asks, and waits.",
			script: `bcd join --bundle "$JOIN_BUNDLE" --token-file gpu-1.token --state-dir machine-3 >machine-3.out 2>&1 &
echo $! >machine-3.pid
` + awaitOutput(`kubectl get -n factory jr`, "AwaitingDecision"),
			shows: []string{"gpu"},
		},
		{
			explain: "Bob may edit the request, but not approve it.",
			as:      "bob",
			script:  `kubectl approve jr --all --yes -n factory`,
			exit:    forbidden,
			shows:   []string{"approve", "gpu"},
		},
		{
			explain: "Alice may.",
			as:      "alice",
			script:  `kubectl approve jr --all --yes -n factory --message "seen in the rack"`,
			shows:   []string{"approved"},
		},
		{
			explain: "The machine joins by itself, at its next poll.",
			script:  `while kill -0 "$(cat machine-3.pid)" 2>/dev/null; do sleep 0.2; done; cat machine-3.out; bcd status --state-dir machine-3`,
		},
		{script: awaitOutput(`kubectl get -n factory fn`, "gpu")},
		{
			explain: "Alice rejects the next one. It is refused as if its token were wrong.",
			script:  `bcd join --bundle "$JOIN_BUNDLE" --token-file gpu-1.token --state-dir machine-4 --once`,
			exit:    pending,
		},
		{
			as: "alice",
			script: awaitOutput(`kubectl get -n factory jr`, "AwaitingDecision") + `
kubectl reject joinrequest -n factory --yes --wait --message "not ours" $(kubectl get jr -n factory --no-headers | awk '/AwaitingDecision/ {print $1}')`,
			shows: []string{"rejected"},
		},
		{
			script: `bcd join --bundle "$JOIN_BUNDLE" --token-file gpu-1.token --state-dir machine-4 --once`,
			exit:   refused,
			shows:  []string{"Join refused"},
		},
		{
			explain: "Who decided what: from the objects, and from the audit rows.",
			script:  `kubectl get -n factory jr -o wide`,
			shows:   []string{"alice", "Approved", "Rejected"},
		},
		{
			script: `psql "$DATABASE_URL" -c 'SELECT at::timestamp(0), actor, action, node_id, detail FROM "join".audit_log ORDER BY id'`,
			shows:  []string{"request.approve", "request.reject", "node.join"},
		},
	}
}

// secretOf is how a token is brought to a machine.
func secretOf(token string) string {
	return `secret=$(kubectl get -n factory jointoken/` + token + ` -o jsonpath='{.status.secretRef.name}')
kubectl get -n factory secret "$secret" -o jsonpath='{.data.token}' | base64 -d >` + token + `.token`
}

// awaitOutput runs a command until its output holds a text, then shows it.
func awaitOutput(command, text string) string {
	return `until ` + command + ` | grep -q "` + text + `"; do sleep 0.2; done; ` + command
}
