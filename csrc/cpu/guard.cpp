// Compares the objects that a guard has noted (pyg_accel/record/guard.py) with the present ones, by
// identity. Each recorded call, of a few microseconds, runs this comparison.
//
// This file declares the part of Python's stable ABI that it uses, so that compiling needs no
// headers of Python and one library serves all versions. The declarations are weak, as Python
// itself has the functions.
#include <cstddef>

#define PYTHON __attribute__((weak))

extern "C" {
struct PyObject;
using Py_ssize_t = std::ptrdiff_t;
using Visit = int (*)(PyObject*, void*);
using Traverse = int (*)(PyObject*, Visit, void*);

PYTHON extern PyObject PyDict_Type;
PYTHON extern PyObject* PyExc_KeyError;
PYTHON extern PyObject* PyExc_ValueError;
PYTHON extern PyObject* PyExc_RuntimeError;
PYTHON void Py_DecRef(PyObject*);
PYTHON PyObject* PyErr_Occurred();
PYTHON int PyErr_ExceptionMatches(PyObject*);
PYTHON void PyErr_Clear();
PYTHON Py_ssize_t PyLong_AsSsize_t(PyObject*);
PYTHON Py_ssize_t PyTuple_Size(PyObject*);
PYTHON PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
PYTHON int PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**);
PYTHON PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
PYTHON int PySequence_Contains(PyObject*, PyObject*);
PYTHON Py_ssize_t PyObject_Size(PyObject*);
PYTHON PyObject* PyObject_Type(PyObject*);
PYTHON PyObject* PyObject_GetItem(PyObject*, PyObject*);
PYTHON PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PYTHON PyObject* PyObject_GetIter(PyObject*);
PYTHON PyObject* PyObject_CallObject(PyObject*, PyObject*);
PYTHON int PyObject_IsTrue(PyObject*);
PYTHON PyObject* PyIter_Next(PyObject*);
PYTHON void* PyType_GetSlot(PyObject*, int);
}

namespace pyg_accel {
namespace {

constexpr int kTraverse = 71;  // Py_tp_traverse

// What an entry (kind, subjects, names, values) says; numbered as in guard.py.
enum Kind : Py_ssize_t {
  kLengths,     // len(subject) == value, for each subject
  kTypes,       // type(subject) is value, for each subject
  kAttributes,  // getattr(subject, names) is value, for each subject
  kItems,       // subjects[name] is value, for each name
  kLacks,       // name not in subjects, for each name
  kElements,    // the elements of subjects are the values
  kReferents,   // the objects that subjects refer to are the values
  kCall,        // subjects(*names) is true
};

// Releases a reference when it goes out of scope.
struct Owned {
  PyObject* object;
  explicit Owned(PyObject* reference) : object(reference) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object)
      Py_DecRef(object);
  }
  // Whether it is another object; a missing one is none.
  bool is(const PyObject* other) const { return object && object == other; }
};

bool is_dict(PyObject* object) {
  return Owned(PyObject_Type(object)).is(&PyDict_Type);
}

bool has_items(PyObject* space, PyObject* names, PyObject* values) {
  const Py_ssize_t size = PyTuple_Size(names);
  const bool exact = is_dict(space);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const name = PyTuple_GetItem(names, i);
    PyObject* const value = PyTuple_GetItem(values, i);
    const bool same = exact ? PyDict_GetItemWithError(space, name) == value
                            : Owned(PyObject_GetItem(space, name)).is(value);
    if (!same)
      return false;
  }
  return true;
}

bool has_elements(PyObject* container, PyObject* values) {
  const Py_ssize_t size = PyTuple_Size(values);
  Py_ssize_t i = 0;
  if (is_dict(container)) {  // its keys
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(container, &at, &key, &value); ++i)
      if (i == size || key != PyTuple_GetItem(values, i))
        return false;
    return i == size;
  }
  const Owned iterator(PyObject_GetIter(container));
  if (!iterator.object)
    return false;
  for (;; ++i) {
    const Owned element(PyIter_Next(iterator.object));
    if (!element.object)
      return i == size && !PyErr_Occurred();
    if (i == size || !element.is(PyTuple_GetItem(values, i)))
      return false;
  }
}

struct Referents {
  PyObject* values;
  Py_ssize_t size;
  Py_ssize_t seen;
};

int visit(PyObject* referent, void* state) {
  auto& now = *static_cast<Referents*>(state);
  if (now.seen == now.size || referent != PyTuple_GetItem(now.values, now.seen))
    return 1;
  ++now.seen;
  return 0;
}

// As gc.get_referents() sees them: reading the attributes of a function calls audit hooks.
bool has_referents(PyObject* objects, PyObject* values) {
  Referents now{values, PyTuple_Size(values), 0};
  const Py_ssize_t size = PyTuple_Size(objects);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const object = PyTuple_GetItem(objects, i);
    const Owned type(PyObject_Type(object));
    const auto traverse = reinterpret_cast<Traverse>(PyType_GetSlot(type.object, kTraverse));
    if (!traverse || traverse(object, visit, &now))
      return false;
  }
  return now.seen == now.size;
}

bool holds(PyObject* entry) {
  const Py_ssize_t kind = PyLong_AsSsize_t(PyTuple_GetItem(entry, 0));
  PyObject* const subjects = PyTuple_GetItem(entry, 1);
  PyObject* const names = PyTuple_GetItem(entry, 2);
  PyObject* const values = PyTuple_GetItem(entry, 3);
  if (kind == kItems)
    return has_items(subjects, names, values);
  if (kind == kElements)
    return has_elements(subjects, values);
  if (kind == kReferents)
    return has_referents(subjects, values);
  if (kind == kCall) {
    const Owned result(PyObject_CallObject(subjects, names));
    return result.object && PyObject_IsTrue(result.object) == 1;
  }
  const Py_ssize_t size = PyTuple_Size(kind == kLacks ? names : subjects);
  for (Py_ssize_t i = 0; i < size; ++i) {
    bool same = false;
    if (kind == kLacks) {
      same = PySequence_Contains(subjects, PyTuple_GetItem(names, i)) == 0;
    } else {
      PyObject* const subject = PyTuple_GetItem(subjects, i);
      PyObject* const value = PyTuple_GetItem(values, i);
      if (kind == kLengths)
        same = PyObject_Size(subject) == PyLong_AsSsize_t(value);
      else if (kind == kTypes)
        same = Owned(PyObject_Type(subject)).is(value);
      else if (kind == kAttributes)
        same = Owned(PyObject_GetAttr(subject, names)).is(value);
    }
    if (!same)
      return false;
  }
  return true;
}

}  // namespace
}  // namespace pyg_accel

// Returns 1 if all entries of all parts hold, else 0. Errors remain set, except for names and cells
// that were deleted and for dictionaries that another thread changes.
extern "C" __attribute__((visibility("default"))) int pyg_accel_unchanged(PyObject* parts) {
  const Py_ssize_t size = PyTuple_Size(parts);
  for (Py_ssize_t p = 0; p < size; ++p) {
    PyObject* const part = PyTuple_GetItem(parts, p);
    const Py_ssize_t entries = PyTuple_Size(part);
    for (Py_ssize_t i = 0; i < entries; ++i) {
      if (pyg_accel::holds(PyTuple_GetItem(part, i)))
        continue;
      if (PyErr_Occurred() &&
          (PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
           PyErr_ExceptionMatches(PyExc_RuntimeError)))
        PyErr_Clear();
      return 0;
    }
  }
  return 1;
}
