package tenant

// The states of a tenant's row.
const (
	active     = "active"
	unlabelled = "unlabelled"
	blocked    = "blocked"
	gone       = "gone"
)

// row is what the database knows of a name.
type row struct {
	uid   string // of the namespace whose nodes these are
	state string
	root  bool
}

// namespace is what the API server knows of it; without a uid it does not exist.
type namespace struct {
	uid      string
	going    bool
	labelled bool
	root     bool
}

// next is the row that a namespace should have. A nil row is none: a namespace
// that never was a tenant needs no row. old reports whether something of the
// row's tenant is left: nodes in service, or certificates that have not run out.
func next(ns namespace, r *row, old bool) *row {
	exists := ns.uid != "" && !ns.going
	tenant := exists && (ns.labelled || ns.root)
	switch {
	case r == nil && !tenant:
		return nil
	case r == nil:
		return &row{uid: ns.uid, state: active, root: ns.root}
	case !exists:
		return &row{uid: r.uid, state: gone, root: ns.root}
	case r.uid == ns.uid && tenant:
		return &row{uid: r.uid, state: active, root: ns.root}
	case r.uid == ns.uid:
		return &row{uid: r.uid, state: unlabelled}
	case !tenant:
		return &row{uid: r.uid, state: gone}
	case old:
		return &row{uid: r.uid, state: blocked, root: ns.root}
	}
	return &row{uid: ns.uid, state: active, root: ns.root}
}
