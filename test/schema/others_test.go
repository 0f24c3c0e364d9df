package schema

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

const (
	token     = "{spec: {pool: gpu}}"
	fullToken = `{spec: {role: ramdisk, pool: gpu, site: ams, uses: 5, expiresAt: "2030-01-31T12:00:00Z", expect: {serialNumber: S1}, allowReclaim: true,
		tokenID: aaaaaaaaaaaa, secretSHA256: ` // and a digest
)

func brought() string { return fullToken + digest + "}}" }

func TestATokensFieldsAreImmutable(t *testing.T) {
	other := strings.Repeat("b", 64)
	for field, value := range map[string]string{
		"role": `"site"`, "pool": `"cpu"`, "site": `"lhr"`, "expect": `{"serialNumber": "S2"}`, "allowReclaim": "false",
		"tokenID": `"bbbbbbbbbbbb"`, "secretSHA256": `"` + other + `"`,
	} {
		want := fmt.Sprintf("spec.%s is immutable", field)
		t.Run(field, func(t *testing.T) {
			change{object: brought(), patch: fmt.Sprintf(`{"spec": {%q: %s}}`, field, value), want: want}.test(t, "JoinToken")
		})
	}
	run(t, "JoinToken", map[string]change{
		"a site appears":                    {object: token, patch: `{"spec": {"site": "ams"}}`, want: "spec.site is immutable"},
		"a site goes":                       {object: brought(), patch: `{"spec": {"site": null}}`, want: "spec.site is immutable"},
		"expect appears":                    {object: token, patch: `{"spec": {"expect": {"serialNumber": "S1"}}}`, want: "spec.expect is immutable"},
		"expect goes":                       {object: brought(), patch: `{"spec": {"expect": null}}`, want: "spec.expect is immutable"},
		"expect grows":                      {object: brought(), patch: `{"spec": {"expect": {"macAddress": "00:00:00:00:00:01"}}}`, want: "spec.expect is immutable"},
		"reclaim appears":                   {object: token, patch: `{"spec": {"allowReclaim": true}}`, want: "spec.allowReclaim is immutable"},
		"reclaim goes":                      {object: brought(), patch: `{"spec": {"allowReclaim": null}}`, want: "spec.allowReclaim is immutable"},
		"a secret appears":                  {object: token, patch: `{"spec": {"tokenID": "aaaaaaaaaaaa", "secretSHA256": "` + digest + `"}}`, want: "spec.tokenID and spec.secretSHA256 are immutable"},
		"a secret goes":                     {object: brought(), patch: `{"spec": {"tokenID": null, "secretSHA256": null}}`, want: "spec.tokenID and spec.secretSHA256 are immutable"},
		"the role goes":                     {object: brought(), patch: `{"spec": {"role": null}}`, want: "spec.role is immutable"}, // the default is another
		"no reclaim, spelt":                 {object: token, patch: `{"spec": {"allowReclaim": false}}`},
		"a pool goes":                       {object: token, patch: `{"spec": {"pool": null}}`, want: "spec.pool: Required value"},
		"uses grow":                         {object: token, patch: `{"spec": {"uses": 7}}`},
		"uses shrink":                       {object: brought(), patch: `{"spec": {"uses": 4}}`, want: "spec.uses may grow, not shrink: delete the JoinToken to revoke it"},
		"uses go":                           {object: brought(), patch: `{"spec": {"uses": null}}`, want: "spec.uses may grow, not shrink"},
		"the expiry moves":                  {object: brought(), patch: `{"spec": {"expiresAt": "2031-01-01T00:00:00.5+01:00"}}`},
		"the expiry goes":                   {object: brought(), patch: `{"spec": {"expiresAt": null}}`},
		"the expiry becomes a time to live": {object: brought(), patch: `{"spec": {"expiresAt": null, "ttl": "1h30m"}}`},
	})
}

// What clients cannot parse, but the API server stores, would stop every list and
// watch of the manager: one tenant would stop all.
func TestNothingIsStoredThatClientsCannotRead(t *testing.T) {
	at := func(s string) string { return `{spec: {pool: gpu, expiresAt: "` + s + `"}}` }
	run(t, "JoinToken", map[string]change{
		"small letters":        {object: at("2030-01-31t12:00:00z"), want: "spec.expiresAt"},
		"a comma":              {object: at("2030-01-31T12:00:00x5Z"), want: "spec.expiresAt"},
		"no zone":              {object: at("2030-01-31T12:00:00"), want: "spec.expiresAt"},
		"a zone beyond a day":  {object: at("2030-01-31T12:00:00+99:99"), want: "spec.expiresAt"},
		"a day that is none":   {object: at("2030-02-31T12:00:00Z"), want: "spec.expiresAt"},
		"a time that is none":  {object: at("2030-01-31T25:00:00Z"), want: "spec.expiresAt"},
		"a date":               {object: at("2030-01-31"), want: "spec.expiresAt"},
		"no time at all":       {object: `{spec: {pool: gpu, ttl: soon}}`, want: "spec.ttl"},
		"a time without unit":  {object: `{spec: {pool: gpu, ttl: "10"}}`, want: "spec.ttl"},
		"days":                 {object: `{spec: {pool: gpu, ttl: 1d}}`, want: "spec.ttl"},
		"more than there is":   {object: `{spec: {pool: gpu, ttl: 99999999999h}}`, want: "spec.ttl"},
		"uses beyond 32 bits":  {object: `{spec: {pool: gpu, uses: 4294967296}}`, want: "spec.uses"},
		"uses that are none":   {object: `{spec: {pool: gpu, uses: 1.5}}`, want: "spec.uses"},
		"an hour and a half":   {object: `{spec: {pool: gpu, ttl: 1h30m}}`},
		"a fraction and zone":  {object: at("2030-01-31T12:00:00.123456789-08:00")},
		"the last second":      {object: at("9999-12-31T23:59:59Z")},
		"the zone's last hour": {object: at("2030-01-31T12:00:00+23:59")},
	})
	// What was taken above is read as the manager reads it.
	list := &v1alpha1.JoinTokenList{}
	if err := cluster(t).Client.List(t.Context(), list); err != nil {
		t.Error(err)
	}
	if len(list.Items) < 4 {
		t.Errorf("%d tokens are there, want those that were taken", len(list.Items))
	}
	run(t, "FleetPool", map[string]change{
		"a lifetime that is none":  {object: "{spec: {certificateLifetime: long}}", want: "spec.certificateLifetime"},
		"a ramdisk's that is none": {object: "{spec: {ramdiskLifetime: 1d}}", want: "spec.ramdiskLifetime"},
	})
	if err := cluster(t).Client.List(t.Context(), &v1alpha1.FleetPoolList{}); err != nil {
		t.Error(err)
	}
}

func TestWhatATokenMaySay(t *testing.T) {
	run(t, "JoinToken", map[string]change{
		"least":               {object: token},
		"full":                {object: brought()},
		"no uses":             {object: "{spec: {pool: gpu, uses: 0}}", want: "spec.uses"},
		"too many uses":       {object: "{spec: {pool: gpu, uses: 1000001}}", want: "spec.uses"},
		"no pool":             {object: "{spec: {}}", want: "spec.pool: Required value"},
		"two expiries":        {object: `{spec: {pool: gpu, ttl: 1h, expiresAt: "2030-01-31T12:00:00Z"}}`, want: "give spec.expiresAt or spec.ttl, not both"},
		"no time to live":     {object: "{spec: {pool: gpu, ttl: 0s}}", want: "spec.ttl must be positive"},
		"less than none":      {object: "{spec: {pool: gpu, ttl: -1h}}", want: "spec.ttl must be positive"},
		"an id alone":         {object: "{spec: {pool: gpu, tokenID: aaaaaaaaaaaa}}", want: "spec.tokenID and spec.secretSHA256 come together"},
		"a hash alone":        {object: "{spec: {pool: gpu, secretSHA256: " + digest + "}}", want: "spec.tokenID and spec.secretSHA256 come together"},
		"an id in capitals":   {object: "{spec: {pool: gpu, tokenID: AAAAAAAAAAAA, secretSHA256: " + digest + "}}", want: "spec.tokenID"},
		"nothing is expected": {object: "{spec: {pool: gpu, expect: {}}}", want: "spec.expect"},
		"a short key's hash":  {object: "{spec: {pool: gpu, expect: {hardwareKeySHA256: aa}}}", want: "spec.expect.hardwareKeySHA256"},
		"a role of no kind":   {object: "{spec: {pool: gpu, role: root}}", want: "Unsupported value"},
	})
}

func TestWhatAPoolMaySay(t *testing.T) {
	run(t, "FleetPool", map[string]change{
		"nothing":                {object: "{}"},
		"everything":             {object: "{spec: {certificateLifetime: 720h, ramdiskLifetime: 168h, onConflict: RevokeAll, requireApproval: true, allowedKinds: [diag.*, disk.wipe], nodeObjects: None}}"},
		"no kinds":               {object: "{spec: {allowedKinds: []}}"},
		"a short lifetime":       {object: "{spec: {certificateLifetime: 59m}}", want: "spec.certificateLifetime must be from 1h to 720h"},
		"a long lifetime":        {object: "{spec: {certificateLifetime: 721h}}", want: "spec.certificateLifetime must be from 1h to 720h"},
		"a ramdisk's, too long":  {object: "{spec: {ramdiskLifetime: 169h}}", want: "spec.ramdiskLifetime must be from 5m to 168h"},
		"a kind twice":           {object: "{spec: {allowedKinds: [a, a]}}", want: "Duplicate value"},
		"a kind of stars":        {object: "{spec: {allowedKinds: ['*']}}", want: "spec.allowedKinds"},
		"another policy":         {object: "{spec: {onConflict: Ignore}}", want: "Unsupported value"},
		"a name with dots":       {object: "{metadata: {name: a.b}}", want: "metadata.name must be a DNS label"},
		"a name that is as long": {object: "{metadata: {name: " + strings.Repeat("a", 64) + "}}", want: "metadata.name must be a DNS label"},
	})
}

func TestPoolsHaveTheirDefaults(t *testing.T) {
	c := cluster(t)
	u := parse(t, c.Namespace(t, nil), "FleetPool", "{metadata: {name: x}}")
	if err := c.Client.Create(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	for field, want := range map[string]string{"certificateLifetime": "168h", "ramdiskLifetime": "24h", "onConflict": "Hold", "nodeObjects": "All"} {
		if got, _, _ := unstructured.NestedString(u.Object, "spec", field); got != want {
			t.Errorf("spec.%s is %q, want %q", field, got, want)
		}
	}
}

func TestARetiredNodeStaysRetired(t *testing.T) {
	const retired = "{spec: {retired: true}}"
	run(t, "FleetNode", map[string]change{
		"set":                    {object: "{}", patch: `{"spec": {"retired": true}}`},
		"taken back":             {object: retired, patch: `{"spec": {"retired": false}}`, want: "spec.retired is final"},
		"removed":                {object: retired, patch: `{"spec": {"retired": null}}`, want: "spec.retired is final"},
		"removed with its spec":  {object: retired, patch: `{"spec": null}`, want: "spec.retired is final"},
		"moved to another pool":  {object: retired, patch: `{"spec": {"pool": "cpu", "site": "ams"}}`},
		"moved to where none is": {object: retired, patch: `{"spec": {"pool": "C P U"}}`, want: "spec.pool"},
	})
	c := cluster(t)
	u := parse(t, c.Namespace(t, nil), "FleetNode", retired)
	u.SetName("x")
	if err := c.Client.Create(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	// A whole update without a spec, as kubectl replace does it.
	delete(u.Object, "spec")
	refused(t, c.Client.Update(t.Context(), u), "spec.retired is final")
	var typed v1alpha1.FleetNode
	if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(u), &typed); err != nil || !typed.Spec.Retired {
		t.Errorf("%v, retired %t", err, typed.Spec.Retired)
	}
}
