package e2e

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/machine"
)

const keysNamespace = "join-keys"

func certificate(t *testing.T, name string) *unstructured.Unstructured {
	t.Helper()
	c := &unstructured.Unstructured{}
	c.SetAPIVersion("cert-manager.io/v1")
	c.SetKind("Certificate")
	if err := sys.kube.Get(t.Context(), client.ObjectKey{Namespace: keysNamespace, Name: name}, c); err != nil {
		t.Fatal(err)
	}
	return c
}

// issuerOf joins one machine and returns the leaf and the issuer that came with it.
func issuerOf(t *testing.T, target *machine.Target, text string) (leaf, issuer *x509.Certificate) {
	t.Helper()
	a, err := joinPatiently(t.Context(), target, newMachine(t), text)
	if err != nil {
		t.Fatal(err)
	}
	if leaf, err = machine.Leaf(a); err != nil {
		t.Fatal(err)
	}
	der, err := wire.DecodeBase64(a.Certificates[1])
	if err != nil {
		t.Fatal(err)
	}
	if issuer, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	if err := leaf.CheckSignatureFrom(issuer); err != nil {
		t.Fatalf("a leaf that does not verify under the issuer sent with it: %v", err)
	}
	return leaf, issuer
}

// pooled is the CAs of the newest bundle.
func pooled(t *testing.T, target *machine.Target) []*x509.Certificate {
	t.Helper()
	resp, err := target.Do(t.Context(), http.MethodGet, wire.PathBundle, io.Reader(nil))
	if err != nil {
		t.Fatal(err)
	}
	var b wire.Bundle
	if err := json.Unmarshal(resp.Body, &b); err != nil {
		t.Fatal(err)
	}
	var cas []*x509.Certificate
	for rest := []byte(b.NodeCAs); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return cas
		}
		ca, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		cas = append(cas, ca)
	}
}

// renew has cert-manager issue a certificate again, as cmctl renew does.
func renew(t *testing.T, name string) {
	t.Helper()
	eventually(t, 30*time.Second, "cert-manager renews "+name, func() error {
		c := certificate(t, name)
		conditions, _, err := unstructured.NestedSlice(c.Object, "status", "conditions")
		if err != nil {
			return err
		}
		kept := []any{map[string]any{
			"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "renewed by a test",
			"lastTransitionTime": metav1.Now().UTC().Format(time.RFC3339), "observedGeneration": c.GetGeneration(),
		}}
		for _, have := range conditions {
			m, _ := have.(map[string]any)
			if m["type"] != "Issuing" {
				kept = append(kept, have)
			} else if m["status"] == "True" {
				return fmt.Errorf("the first issuance is under way")
			}
		}
		if err := unstructured.SetNestedSlice(c.Object, kept, "status", "conditions"); err != nil {
			return err
		}
		return sys.kube.Status().Update(t.Context(), c)
	})
}

func TestCARotatesLiveUnderLoad(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	text := token(t, ns, "many", "general", 100000)
	target := sys.target(t)
	oldLeaf, oldCA := issuerOf(t, target, text)
	stop := keepJoining(t, ns, text)

	// A new CA with a new key takes over.
	next := certificate(t, "node-ca-1")
	next.SetName("node-ca-2")
	for _, f := range []string{"resourceVersion", "uid", "creationTimestamp", "managedFields", "generation"} {
		unstructured.RemoveNestedField(next.Object, "metadata", f)
	}
	unstructured.RemoveNestedField(next.Object, "status")
	if err := unstructured.SetNestedField(next.Object, "node-ca-2", "spec", "secretName"); err != nil {
		t.Fatal(err)
	}
	if err := sys.kube.Create(t.Context(), next); client.IgnoreAlreadyExists(err) != nil {
		t.Fatal(err)
	}
	var newCA *x509.Certificate
	eventually(t, 30*time.Second, "node-ca-2 signs", func() error {
		if _, newCA = issuerOf(t, target, text); bytes.Equal(newCA.SubjectKeyId, oldCA.SubjectKeyId) {
			return fmt.Errorf("%s signs still", newCA.Subject)
		}
		return nil
	})

	// The same key under a new certificate: what cert-manager does when it renews.
	renew(t, "node-ca-2")
	eventually(t, 30*time.Second, "the renewed certificate of node-ca-2 signs", func() error {
		_, ca := issuerOf(t, target, text)
		if bytes.Equal(ca.Raw, newCA.Raw) {
			return fmt.Errorf("the first one signs still")
		}
		if !bytes.Equal(ca.RawSubjectPublicKeyInfo, newCA.RawSubjectPublicKeyInfo) {
			t.Fatal("renewal changed the key")
		}
		return nil
	})
	for _, a := range stop() {
		if a.Outcome != wire.OutcomeJoined {
			t.Errorf("outcome %s while the CA changed", a.Outcome)
		}
	}

	// While they overlap both verify, for who has the newest bundle.
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := sys.dev(root, "rotate"); err != nil {
		t.Fatal(err)
	}
	newLeaf, _ := issuerOf(t, target, text)
	eventually(t, 15*time.Second, "the bundle has both CAs", func() error {
		roots := x509.NewCertPool()
		for _, ca := range pooled(t, target) {
			roots.AddCert(ca)
		}
		for _, leaf := range []*x509.Certificate{oldLeaf, newLeaf} {
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
				return err
			}
		}
		return nil
	})
}
