package manifests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/better-compute/join-operator/config/policies"
	"github.com/better-compute/join-operator/controllers/guard"
	"github.com/better-compute/join-operator/test/kubetest"
)

func TestConfigIsTakenByTheAPIServer(t *testing.T) {
	for _, folder := range []string{"config/default", "config/cluster", "config/dev"} {
		t.Run(folder, func(t *testing.T) { taken(t, kubetest.Kustomize(t, folder)) })
	}
}

func TestTheChartIsTakenByTheAPIServer(t *testing.T) {
	elsewhere := []string{
		"--namespace", "fleet", "--set", "trustDomain=fleet.example.com", "--set", "endpoints={https://join.example.com:8443,https://192.0.2.1}",
		"--set", "namespaces.keys=fleet-keys,namespaces.trust=fleet-trust,certManager.namespace=cm,stampDecisions=always",
		"--set", "image.digest=sha256:" + strings.Repeat("a", 64), "--set", "imagePullSecrets[0].name=pull", "--set", "database.keys.key=dsn",
		"--set", "gateway.service.type=NodePort,gateway.extraArgs={--trusted-hops=1},gateway.service.annotations.a=b",
	}
	for name, args := range map[string][]string{
		"default": values, "elsewhere": elsewhere, "plain": append(slices.Clone(values), "--set", "networkPolicies.enabled=false,gateway.service.type=ClusterIP"),
	} {
		t.Run(name, func(t *testing.T) {
			objects := chart(t, args...)
			taken(t, objects)
			if name != "elsewhere" {
				return
			}
			for _, o := range objects {
				b, err := o.MarshalJSON()
				if err != nil {
					t.Fatal(err)
				}
				// Accounts, roles and jobs keep their names; namespaces do not.
				text := strings.NewReplacer(`"namespace":"join-`, "LEFT", "serviceaccount:join-system:", "LEFT", "example.org", "LEFT").Replace(string(b))
				if strings.Contains(text, "LEFT") || strings.Contains(text, "'join-keys'") || strings.Contains(text, ".join-system.") {
					t.Errorf("%s speaks of the default's namespaces or trust domain: %s", key(o), text)
				}
			}
		})
	}
}

// What the chart installs is what config/default installs: labels and Helm's own
// annotations aside, and but for the settings, which the chart writes where they
// are used. The operator's own namespace is made by who installs the release.
func TestTheChartSaysWhatConfigSays(t *testing.T) {
	fromConfig, fromChart := map[string]map[string]any{}, map[string]map[string]any{}
	for _, o := range kubetest.Kustomize(t, "config/default") {
		if k := key(o); k != "Namespace /join-system" && k != "ConfigMap join-system/join-settings" {
			fromConfig[k] = plain(t, o)
		}
	}
	for _, o := range chart(t, append(slices.Clone(values), "--set", "stampDecisions=never")...) {
		fromChart[key(o)] = plain(t, o)
	}
	if diff := cmp.Diff(fromConfig, fromChart); diff != "" {
		t.Errorf("config/default (-) and the chart (+):\n%s", diff)
	}
}

// plain is an object without what differs by design.
func plain(t *testing.T, o *unstructured.Unstructured) map[string]any {
	t.Helper()
	o = o.DeepCopy()
	if o.GetKind() != "ClusterRole" { // there labels mean something
		o.SetLabels(nil)
	} else {
		labels := o.GetLabels()
		for k := range labels {
			if !strings.HasPrefix(k, "rbac.authorization.k8s.io/") {
				delete(labels, k)
			}
		}
		if len(labels) == 0 {
			labels = nil
		}
		o.SetLabels(labels)
	}
	o.SetAnnotations(nil)
	if spec := podSpec(t, o); spec != nil {
		for i := range spec.Containers {
			c := &spec.Containers[i]
			for j, arg := range c.Args {
				c.Args[j] = strings.NewReplacer("$(TRUST_DOMAIN)", "example.org", "$(ENDPOINT)", "https://join.example.org").Replace(arg)
			}
			c.Env = slices.DeleteFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "TRUST_DOMAIN" || e.Name == "ENDPOINT" })
			c.ImagePullPolicy = ""
		}
		m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(spec)
		if err != nil {
			t.Fatal(err)
		}
		at := []string{"spec", "template", "spec"}
		if o.GetKind() == "CronJob" {
			at = []string{"spec", "jobTemplate", "spec", "template", "spec"}
		}
		if err := unstructured.SetNestedMap(o.Object, m, at...); err != nil {
			t.Fatal(err)
		}
	}
	return o.Object
}

// podSpec is that of a Deployment or a CronJob, nil for other kinds.
func podSpec(t *testing.T, o *unstructured.Unstructured) *corev1.PodSpec {
	t.Helper()
	var err error
	switch o.GetKind() {
	case "Deployment":
		var d appsv1.Deployment
		if err = runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &d); err == nil {
			return &d.Spec.Template.Spec
		}
	case "CronJob":
		var c batchv1.CronJob
		if err = runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &c); err == nil {
			return &c.Spec.JobTemplate.Spec.Template.Spec
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", key(o), err)
	}
	return nil
}

func TestTheChartRefusesValuesThatMakeNoSense(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"nothing":                   {nil, "trustDomain"},
		"no endpoint":               {[]string{"--set", "trustDomain=example.org"}, "endpoints"},
		"an endpoint without TLS":   {[]string{"--set", "trustDomain=example.org", "--set", "endpoints={http://join.example.org}"}, "endpoints"},
		"an endpoint with a path":   {[]string{"--set", "trustDomain=example.org", "--set", "endpoints={https://join.example.org/v1}"}, "endpoints"},
		"a trust domain with a URL": {append(slices.Clone(values), "--set", "trustDomain=spiffe://example.org"), "trustDomain"},
		"an unknown value":          {append(slices.Clone(values), "--set", "gatewya.replicas=3"), "gatewya"},
		"no replicas":               {append(slices.Clone(values), "--set", "joinService.replicas=0"), "joinService"},
		"one namespace for all":     {append(slices.Clone(values), "--set", "namespaces.keys=join-system"), "must differ"},
		"one namespace for keys":    {append(slices.Clone(values), "--set", "namespaces.trust=join-keys"), "must differ"},
		"a digest that is none":     {append(slices.Clone(values), "--set", "image.digest=sha256:abc"), "digest"},
	} {
		t.Run(name, func(t *testing.T) {
			_, errs, err := helm(t, c.args...)
			if err == nil || !strings.Contains(errs, c.want) {
				t.Errorf("got %v, %q; want an error that says %q", err, errs, c.want)
			}
		})
	}
}

// Where the cluster has MutatingAdmissionPolicy, decisions are stamped.
func TestTheChartStampsWhereTheClusterCan(t *testing.T) {
	const stamp = "MutatingAdmissionPolicy /joinrequest-stamp.join.better-compute.dev"
	if slices.Contains(keys(chart(t, values...)), stamp) {
		t.Error("stamped where the cluster cannot")
	}
	able := append(slices.Clone(values), "--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")
	if !slices.Contains(keys(chart(t, able...)), stamp) {
		t.Error("not stamped where the cluster can")
	}
}

func TestTheChartsFilesAreThoseOfConfig(t *testing.T) {
	root := repository(t)
	from := map[string]string{
		"crds": "config/crd/bases", "policies": "config/policies", "rbac": "config/rbac", "certmanager": "config/certmanager", "stamp": "config/components/stamp-decisions",
	}
	found := 0
	for folder, source := range from {
		files, err := filepath.Glob(filepath.Join(root, source, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			name := filepath.Base(file)
			if name == "kustomization.yaml" || name == "certmanager.yaml" { // the latter is a template
				continue
			}
			found++
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(root, "charts/join-operator/files", folder, name))
			if err != nil || string(got) != string(want) {
				t.Errorf("%s of the chart is old (%v): run charts/sync.sh", filepath.Join(folder, name), err)
			}
		}
	}
	copies, err := filepath.Glob(filepath.Join(root, "charts/join-operator/files/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(copies) != found || found == 0 {
		t.Errorf("the chart has %d files, config/ %d: run charts/sync.sh", len(copies), found)
	}
}

// The manager compares the cluster with its own copy of the policies: what is
// installed by either way must be what it expects, wherever it is installed.
func TestTheManagerExpectsThePoliciesThatAreInstalled(t *testing.T) {
	names := policies.Namespaces{System: "fleet", Keys: "fleet-keys", Trust: "fleet-trust"}
	args := []string{"--namespace", names.System, "--set", "trustDomain=example.org", "--set", "endpoints={https://join.example.org}",
		"--set", "namespaces.keys=" + names.Keys + ",namespaces.trust=" + names.Trust}
	for name, c := range map[string]struct {
		names   policies.Namespaces
		objects []*unstructured.Unstructured
	}{
		"config":          {policies.Namespaces{}, kubetest.Kustomize(t, "config/default")},
		"chart":           {policies.Namespaces{}, chart(t, values...)},
		"chart elsewhere": {names, chart(t, args...)},
	} {
		t.Run(name, func(t *testing.T) {
			manifests, err := policies.Manifests(c.names)
			if err != nil {
				t.Fatal(err)
			}
			expected, err := guard.Parse(manifests...)
			if err != nil {
				t.Fatal(err)
			}
			cl := kubetest.Start(t)
			for _, o := range c.objects {
				if o.GetKind() == "ValidatingAdmissionPolicy" || o.GetKind() == "ValidatingAdmissionPolicyBinding" {
					cl.Apply(t, []*unstructured.Unstructured{o})
				}
			}
			state, err := (&guard.Guard{Expected: expected}).Check(t.Context(), cl.Client)
			if err != nil || !state.Guarded() {
				t.Errorf("%v: %v", err, state.Problems)
			}
		})
	}
}

// Each container's command is a program of cmd/, and it knows its flags.
func TestProgramsKnowTheFlagsThatTheyAreGiven(t *testing.T) {
	root := repository(t)
	flags := regexp.MustCompile(`(?m)^\s+--?([a-z][a-z0-9-]*)`)
	dockerfile, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, o := range kubetest.Kustomize(t, "config/default") {
		spec := podSpec(t, o)
		if spec == nil {
			continue
		}
		c := spec.Containers[0]
		program := strings.TrimPrefix(c.Command[0], "/")
		t.Run(program, func(t *testing.T) {
			if !strings.Contains(string(dockerfile), program) {
				t.Errorf("the image holds no %s", program)
			}
			args := []string{"run", "./cmd/" + program}
			if !strings.HasPrefix(c.Args[0], "-") {
				args = append(args, c.Args[0])
			}
			cmd := exec.CommandContext(t.Context(), "go", append(args, "-h")...)
			cmd.Dir = root
			// Some answer -h with an error; what counts is what they print.
			help, _ := cmd.CombinedOutput()
			known := map[string]bool{}
			for _, m := range flags.FindAllSubmatch(help, -1) {
				known[string(m[1])] = true
			}
			for _, arg := range c.Args {
				name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
				if strings.HasPrefix(arg, "--") && !known[name] {
					t.Errorf("%s knows no --%s:\n%s", program, name, help)
				}
			}
			checked++
		})
	}
	if checked != 4 {
		t.Errorf("%d programs, want 4", checked)
	}
}

// Whatever runs gets by with the least (the API server's own judgement is asked for
// in TestConfigIsTakenByTheAPIServer, whose namespaces warn about anything else).
func TestOnlyTheGatewayIsOpenAndItHoldsNoCredentialsOfOthers(t *testing.T) {
	mounted := map[string][]string{}
	for _, o := range kubetest.Kustomize(t, "config/default") {
		spec := podSpec(t, o)
		if spec == nil {
			continue
		}
		for _, v := range spec.Volumes {
			if v.Secret == nil {
				t.Errorf("%s mounts %s, which is no Secret", key(o), v.Name)
				continue
			}
			name := v.Secret.SecretName
			for _, item := range v.Secret.Items {
				name += ":" + item.Key
			}
			mounted[o.GetName()] = append(mounted[o.GetName()], name)
		}
		mounts := spec.AutomountServiceAccountToken
		if gateway := o.GetName() == "join-gateway"; gateway != (mounts != nil && !*mounts) {
			t.Errorf("%s mounts its account's token: %v", key(o), mounts)
		}
		for _, c := range spec.Containers {
			if len(c.EnvFrom) > 0 {
				t.Errorf("%s takes its environment from elsewhere", key(o))
			}
		}
	}
	want := map[string][]string{
		"join-manager": {"join-database-manager"}, "join-service": {"join-service-serving", "join-database-service"},
		"join-gateway": {"join-gateway-serving", "join-gateway-client"}, "join-keys": {"join-gateway-serving:ca.crt", "join-database-keys"},
	}
	if diff := cmp.Diff(want, mounted); diff != "" {
		t.Errorf("mounted Secrets, want (-) got (+):\n%s", diff)
	}
}
