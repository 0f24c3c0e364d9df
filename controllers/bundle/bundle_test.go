package bundle_test

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/controllers/bundle"
	"github.com/better-compute/join-operator/controllers/internal/controllertest"
	"github.com/better-compute/join-operator/controllers/outbox"
)

func TestMain(m *testing.M) { controllertest.Main(m) }

func TestConfigMapHoldsTheNewestBundle(t *testing.T) {
	e := controllertest.New(t)
	ns := e.Namespace().Name
	e.Run(func(mgr ctrl.Manager, feed *outbox.Feed) error {
		return (&bundle.Reconciler{Client: mgr.GetClient(), DB: e.Manager, Feed: feed, SystemNamespace: ns, SkipNameValidation: true}).SetupWithManager(mgr)
	})
	publish := func(generation int, payload string) {
		e.Exec(`INSERT INTO bundles (generation, payload, jws) VALUES ($1, $2, '')`, generation, []byte(payload))
		e.Exec(`INSERT INTO events (type, tenant, data) VALUES ('bundle.published', $1, '{}')`, ns)
		e.Notify()
	}
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "join-bundle"}}
	holds := func(want string) {
		t.Helper()
		e.Eventually(func(ctx context.Context) error {
			if err := e.Client.Get(ctx, client.ObjectKeyFromObject(cm), cm); err != nil {
				return err
			}
			if cm.Data["bundle.json"] != want || len(cm.Data) != 1 {
				return fmt.Errorf("data is %q", cm.Data)
			}
			return nil
		})
	}
	publish(1, `{"generation": 1}`)
	holds(`{"generation": 1}`)
	publish(2, `{"generation": 2}`)
	holds(`{"generation": 2}`)
	e.Patch(cm, func() { cm.Data["bundle.json"], cm.Data["evil"] = "{}", "x" })
	holds(`{"generation": 2}`)
	e.Delete(cm)
	holds(`{"generation": 2}`)
}
