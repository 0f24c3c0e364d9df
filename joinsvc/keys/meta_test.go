package keys

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

var (
	getOptions  = metav1.GetOptions{}
	listOptions = metav1.ListOptions{}
)

func objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}
