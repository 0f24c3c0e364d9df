// Package record makes the JoinRequest objects of joins that wait for a person,
// in the background and as well as it can: what it misses, while the API server is
// away for instance, the manager's sweep makes from the rows.
package record

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/joinsvc"
)

const (
	// namePrefix and the row's id make an object's name.
	namePrefix = "jr-"
	// typeLabel lets people select requests by the type of their attestor.
	typeLabel = "join.better-compute.dev/attestor-type"
	resource  = "joinrequests"

	// createTimeout bounds one creation.
	createTimeout = time.Second
	// waiting bounds how many wait to be created, workers how many are at once.
	waiting = 1024
	workers = 4
)

// Recorder makes objects. It may create JoinRequests and do nothing else.
type Recorder struct {
	client  rest.Interface
	log     *slog.Logger
	queue   chan joinsvc.PendingRequest
	results *prometheus.CounterVec
}

// New makes a recorder that is nobody's until Run.
func New(cfg *rest.Config, log *slog.Logger, reg prometheus.Registerer) (*Recorder, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("client for join requests: %w", err)
	}
	own := rest.CopyConfig(cfg)
	own.GroupVersion = &v1alpha1.GroupVersion
	own.APIPath = "/apis"
	own.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	own.ContentType = runtime.ContentTypeJSON
	client, err := rest.RESTClientFor(own)
	if err != nil {
		return nil, fmt.Errorf("client for join requests: %w", err)
	}
	r := &Recorder{
		client: client, log: log, queue: make(chan joinsvc.PendingRequest, waiting),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "join_request_objects_total", Help: "JoinRequest objects by what became of them here; the manager makes those that failed or were dropped."}, []string{"result"}),
	}
	if err := reg.Register(r.results); err != nil {
		return nil, fmt.Errorf("metrics of join requests: %w", err)
	}
	return r, nil
}

// Record leaves a request to be made. It never blocks: with too many waiting, it
// drops the request.
func (r *Recorder) Record(p joinsvc.PendingRequest) {
	select {
	case r.queue <- p:
	default:
		r.results.WithLabelValues("dropped").Inc()
	}
}

// Run makes objects until ctx ends.
func (r *Recorder) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case p := <-r.queue:
					r.create(ctx, p)
				}
			}
		})
	}
	wg.Wait()
}

func (r *Recorder) create(ctx context.Context, p joinsvc.PendingRequest) {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	err := r.client.Post().Namespace(p.Namespace).Resource(resource).Body(object(p)).Do(ctx).Error()
	result := "created"
	switch {
	case apierrors.IsAlreadyExists(err):
		result = "exists"
	case err != nil:
		result = "failed"
		r.log.Warn("a join request's object was not made; the manager will make it", "join_request", namePrefix+p.ID, "namespace", p.Namespace, "error", err)
	}
	r.results.WithLabelValues(result).Inc()
}

// object is the undecided object of a row, as the manager makes it too.
func object(p joinsvc.PendingRequest) *v1alpha1.JoinRequest {
	return &v1alpha1.JoinRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "JoinRequest"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: namePrefix + p.ID, Labels: map[string]string{typeLabel: p.AttestorType},
		},
		Spec: v1alpha1.JoinRequestSpec{JoinRequestAsk: p.Spec},
	}
}
