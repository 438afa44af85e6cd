// Everything the kernels need from outside, included before any target pragma: a standard header
// compiled under one would leak instructions that this processor may not have.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "stages.h"
