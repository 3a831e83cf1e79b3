/* Collectives over sockets of their own: _streams.c. */
#ifndef ASYNCCOMM_STREAMS_H
#define ASYNCCOMM_STREAMS_H

PyObject *core_move(PyObject *module, PyObject *args);
PyObject *core_ring(PyObject *module, PyObject *args);

#endif
