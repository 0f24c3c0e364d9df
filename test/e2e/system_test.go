package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/joinsvc/rows"
	"github.com/better-compute/join-operator/test/machine"
)

// system is the dev system that all tests of this package share.
type system struct {
	dir  string
	env  map[string]string
	kube client.Client
	db   *pgxpool.Pool
}

var sys *system

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (int, error) {
	root, err := filepath.Abs("../..")
	if err != nil {
		return 1, err
	}
	dir := os.Getenv("JOIN_DEV_DIR")
	if dir == "" {
		dir = filepath.Join(root, ".dev", "e2e")
	}
	s := &system{dir: dir}
	if err := s.dev(root, "up"); err != nil {
		return 1, fmt.Errorf("bring the system up: %w", err)
	}
	if os.Getenv("JOIN_DEV_KEEP") == "" {
		defer func() {
			if err := s.dev(root, "down"); err != nil {
				fmt.Fprintln(os.Stderr, "e2e: take the system down:", err)
			}
		}()
	}
	if err := s.connect(); err != nil {
		return 1, err
	}
	defer s.db.Close()
	sys = s
	return m.Run(), nil
}

// dev runs a command of the dev system's launcher.
func (s *system) dev(root string, args ...string) error {
	cmd := exec.Command(filepath.Join(root, ".bin", "dev"), append(args, "--dir", s.dir)...)
	cmd.Dir = root
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

func (s *system) connect() error {
	env, err := readEnv(filepath.Join(s.dir, "env"))
	if err != nil {
		return err
	}
	s.env = env
	cfg, err := clientcmd.BuildConfigFromFlags("", env["KUBECONFIG"])
	if err != nil {
		return err
	}
	cfg.QPS = -1
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	if s.kube, err = client.New(cfg, client.Options{Scheme: scheme}); err != nil {
		return err
	}
	s.db, err = rows.Open(context.Background(), env["DATABASE_URL"], rows.Options{})
	return err
}

// readEnv reads the exports of .dev/env as the shell would.
func readEnv(file string) (map[string]string, error) {
	out, err := exec.Command("bash", "-c", `set -a; . "$1"; env -0`, "bash", file).Output()
	if err != nil {
		return nil, fmt.Errorf("source %s: %w", file, err)
	}
	env := map[string]string{}
	scanner := bufio.NewScanner(strings.NewReader(strings.ReplaceAll(string(out), "\x00", "\n")))
	for scanner.Scan() {
		if k, v, ok := strings.Cut(scanner.Text(), "="); ok {
			env[k] = v
		}
	}
	return env, scanner.Err()
}

// environ is the environment of somebody who sourced .dev/env.
func (s *system) environ(extra ...string) []string {
	env := os.Environ()
	for _, k := range []string{"KUBECONFIG", "JOIN_ENDPOINT", "JOIN_TLS_CA", "JOIN_BUNDLE", "DATABASE_URL", "PATH"} {
		env = append(env, k+"="+s.env[k])
	}
	return append(env, extra...)
}

func (s *system) target(t *testing.T) *machine.Target {
	t.Helper()
	target, err := machine.Open(s.env["JOIN_ENDPOINT"], s.env["JOIN_TLS_CA"], s.env["JOIN_BUNDLE"])
	if err != nil {
		t.Fatal(err)
	}
	return target
}

// eventually polls until check is content, and fails with its last complaint.
func eventually(t *testing.T, within time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %v", what, within, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// tenant makes a namespace that is a tenant, named after the test.
func tenant(t *testing.T) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "e2e-",
		Labels:       map[string]string{v1alpha1.TenantLabel: v1alpha1.TenantLabelValue},
	}}
	if err := sys.kube.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sys.kube.Delete(context.Background(), ns); client.IgnoreNotFound(err) != nil {
			t.Errorf("delete namespace %s: %v", ns.Name, err)
		}
	})
	return ns.Name
}

func pool(t *testing.T, ns, name string, requireApproval bool) {
	t.Helper()
	p := &v1alpha1.FleetPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: v1alpha1.FleetPoolSpec{RequireApproval: requireApproval}}
	if err := sys.kube.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	ready(t, p)
}

// token makes a JoinToken and returns its text once it is in force.
func token(t *testing.T, ns, name, pool string, uses int32) string {
	t.Helper()
	jt := &v1alpha1.JoinToken{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: v1alpha1.JoinTokenSpec{Pool: pool, Uses: uses}}
	if err := sys.kube.Create(t.Context(), jt); err != nil {
		t.Fatal(err)
	}
	ready(t, jt)
	var secret corev1.Secret
	if err := sys.kube.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: jt.Status.SecretRef.Name}, &secret); err != nil {
		t.Fatal(err)
	}
	return string(secret.Data["token"])
}

// ready waits for an object's Ready condition at its newest generation.
func ready(t *testing.T, obj client.Object) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("%T %s/%s ready", obj, obj.GetNamespace(), obj.GetName()), func() error {
		if err := sys.kube.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		for _, c := range conditions(obj) {
			if c.Type == v1alpha1.ConditionReady && c.Status == metav1.ConditionTrue && c.ObservedGeneration == obj.GetGeneration() {
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", conditions(obj))
	})
}

func conditions(obj client.Object) []metav1.Condition {
	switch o := obj.(type) {
	case *v1alpha1.FleetPool:
		return o.Status.Conditions
	case *v1alpha1.JoinToken:
		return o.Status.Conditions
	case *v1alpha1.FleetNode:
		return o.Status.Conditions
	case *v1alpha1.JoinRequest:
		return o.Status.Conditions
	default:
		return nil
	}
}

func newMachine(t *testing.T) *machine.Machine {
	t.Helper()
	m, err := machine.New()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// count is the single number that a query returns.
func count(t *testing.T, sql string, args ...any) int {
	t.Helper()
	var n int
	if err := sys.db.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
