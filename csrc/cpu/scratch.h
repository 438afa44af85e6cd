// Scratch memory and operands of the register machine (machine.h). Included once per instruction
// set.

inline constexpr int kTile = 256;

inline constexpr int kRegisters = kMaxOperands + kMaxInstructions;

// The registers of a machine. Machines that run one after another may share one scratch.
template <class T, class I>
struct Scratch {
  using A = acc_t<T>;
  // A tile and another vector, as the last store of a loop may exceed the tile.
  alignas(64) A values[kRegisters][kTile + 16];
  alignas(64) A spread[kRegisters][kTile + 16];
  alignas(64) I indices[kMaxOperands][kTile];
};

// Numbers of entry `begin` and later ones, computed before: number n of entry k and head h is
// data[n * kStepNumbers + (k - begin) * heads + h].
template <class A>
struct Numbers {
  const A* data = nullptr;
  int64_t begin = 0;
  int64_t heads = 1;
};

// An operand whose rows differ from entry to entry.
template <class I>
struct Moving {
  int number;
  bool index;
  int64_t stride;
  const I* ids;  // the row of every entry from `first` to `last`; null if entry k reads row k
  int64_t first;
  int64_t last;
  const void* base;
};
