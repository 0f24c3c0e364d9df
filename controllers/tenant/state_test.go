package tenant

import "testing"

func TestTheStandingOfANamespace(t *testing.T) {
	tenant := namespace{uid: "new", labelled: true}
	for name, c := range map[string]struct {
		ns   namespace
		row  *row
		old  bool
		want *row
	}{
		"no tenant, never was":              {ns: namespace{uid: "new"}},
		"nothing at all":                    {},
		"labelled":                          {ns: tenant, want: &row{uid: "new", state: active}},
		"labelled, going":                   {ns: namespace{uid: "new", labelled: true, going: true}},
		"as before":                         {ns: tenant, row: &row{uid: "new", state: active}, want: &row{uid: "new", state: active}},
		"label gone":                        {ns: namespace{uid: "new"}, row: &row{uid: "new", state: active}, want: &row{uid: "new", state: unlabelled}},
		"label back":                        {ns: tenant, row: &row{uid: "new", state: unlabelled}, want: &row{uid: "new", state: active}},
		"going":                             {ns: namespace{uid: "new", labelled: true, going: true}, row: &row{uid: "new", state: active}, want: &row{uid: "new", state: gone}},
		"gone":                              {row: &row{uid: "old", state: active}, want: &row{uid: "old", state: gone}},
		"made again, nodes left":            {ns: tenant, row: &row{uid: "old", state: gone}, old: true, want: &row{uid: "old", state: blocked}},
		"made again before it was missed":   {ns: tenant, row: &row{uid: "old", state: active}, old: true, want: &row{uid: "old", state: blocked}},
		"still blocked":                     {ns: tenant, row: &row{uid: "old", state: blocked}, old: true, want: &row{uid: "old", state: blocked}},
		"nothing left":                      {ns: tenant, row: &row{uid: "old", state: blocked}, want: &row{uid: "new", state: active}},
		"made again without a label":        {ns: namespace{uid: "new"}, row: &row{uid: "old", state: active}, old: true, want: &row{uid: "old", state: gone}},
		"root needs no label":               {ns: namespace{uid: "new", root: true}, want: &row{uid: "new", state: active, root: true}},
		"a root made again, nodes left":     {ns: namespace{uid: "new", root: true}, row: &row{uid: "old", state: active, root: true}, old: true, want: &row{uid: "old", state: blocked, root: true}},
		"a tenant that becomes the root":    {ns: namespace{uid: "new", root: true, labelled: true}, row: &row{uid: "new", state: active}, want: &row{uid: "new", state: active, root: true}},
		"a blocked one that is going again": {ns: namespace{uid: "new", labelled: true, going: true}, row: &row{uid: "old", state: blocked}, old: true, want: &row{uid: "old", state: gone}},
	} {
		t.Run(name, func(t *testing.T) {
			got := next(c.ns, c.row, c.old)
			if (got == nil) != (c.want == nil) || (got != nil && *got != *c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
